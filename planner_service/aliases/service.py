"""Aliases: names that point at plans. A change may require a previous state, and is added to the history."""

from dataclasses import dataclass

from pipeplan.errors import InvalidInputError, PreconditionFailedError
from pipeplan.protocol.listing import ListQuery, Page
from pipeplan.protocol.plans import Alias, AliasMove, AliasQuery, require_name
from planner_service.aliases import store as storage
from planner_service.platform import trail
from planner_service.platform.context import Context, found


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The precondition of a change: the alias has one of these versions, it exists, or it does not exist."""

    versions: tuple[str, ...] | None = None
    present: bool = False
    absent: bool = False

    def check(self, name: str, alias: Alias | None) -> None:
        """Raises PreconditionFailedError if it does not hold."""
        if alias is None:
            if self.present or self.versions is not None:
                raise PreconditionFailedError(f"there is no alias {name}")
        elif self.absent:
            raise PreconditionFailedError(f"alias {name} exists already: it points at {alias.plan_id}")
        elif self.versions is not None and str(alias.version) not in self.versions:
            told = f"it points at {alias.plan_id} and has version {alias.version}"
            raise PreconditionFailedError(f"alias {name} has been moved in the meantime: {told}")


ANYTHING = Expected()


def put(context: Context, name: str, plan_id: str, *, by: str, expected: Expected = ANYTHING) -> tuple[Alias, bool]:
    """Points the name at the plan, and returns whether the name is new. If it points there already, nothing changes."""
    require_name(name)
    with context.database.write() as connection:
        now = context.now()
        if not storage.hold_plan(connection, plan_id):
            raise InvalidInputError("plan_id", "must be the id of a stored plan", plan_id)

        current = storage.get(connection, name, lock=True)
        expected.check(name, current)
        new = current is None and storage.add(connection, name, plan_id, by, now)
        if current is None and not new:  # another transaction has just added it
            current = storage.get(connection, name, lock=True)
            expected.check(name, current)

        if new or (current is not None and current.plan_id != plan_id):
            storage.move(connection, name, plan_id, by, now)
        trail.record(connection, "alias.put", name, now, detail=f"plan {plan_id}")
        return found("alias", name, storage.get(connection, name)), new


def get(context: Context, name: str) -> Alias:
    """Where the name points. Raises NotFoundError."""
    require_name(name)
    with context.database.read() as connection:
        return found("alias", name, storage.get(connection, name))


def page(context: Context, query: AliasQuery) -> Page[Alias]:
    """The aliases that the query asks for."""
    with context.database.read() as connection:
        return storage.page(connection, query)


def history(context: Context, name: str, query: ListQuery) -> Page[AliasMove]:
    """The alias's targets, the latest first; they outlive the alias. Raises NotFoundError for one never set."""
    require_name(name)
    with context.database.read() as connection:
        latest = storage.history(connection, name, ListQuery(limit=1)).items
        found("alias", name, latest or None)
        return storage.history(connection, name, query)


def delete(context: Context, name: str, *, by: str, expected: Expected = ANYTHING) -> None:
    """Deletes the name. Raises NotFoundError if there is none."""
    require_name(name)
    with context.database.write() as connection:
        alias = storage.get(connection, name, lock=True)
        expected.check(name, alias)
        found("alias", name, alias)
        storage.remove(connection, name, by, context.now())
        trail.record(connection, "alias.delete", name, context.now())
