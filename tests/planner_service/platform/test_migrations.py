"""Migrations: they give exactly the declared tables, and run both ways with data in them."""

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import inspect, text

from pipeplan.documents.cluster import Cluster, DeviceGroup, Level
from pipeplan.documents.identity import canonical_json
from pipeplan.errors import InvalidInputError, ServiceError, UnavailableError
from pipeplan.protocol.documents import ClusterQuery
from pipeplan.protocol.jobs import Completion
from planner_service.app import create_app, prepare
from planner_service.documents.service import clusters
from planner_service.jobs import service as jobs
from planner_service.overview.openapi import CLUSTER
from planner_service.plans import service as plans
from planner_service.platform.context import Context
from planner_service.platform.database import Database
from planner_service.platform.listing import Cut
from planner_service.platform.migrations import downgrade, head, migrations_folder, revision_of, upgrade
from planner_service.platform.settings import Settings
from planner_service.platform.tables import metadata
from planner_service.runs import service as runs
from tests.planner_service.answers import halve, halve_unplayed
from tests.planner_service.examples import ANY_WORK, PROFILE_TASK, run_result, run_task, store_plan
from tests.planner_service.servers import PIPEPLAN, environment, pipeplan


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """A database at the newest revision."""
    database = Database(database_url)
    upgrade(database)
    yield database
    database.close()


def test_the_migrations_give_exactly_the_declared_tables(database: Database) -> None:
    with database.read() as connection:
        migration = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        differences = compare_metadata(migration, metadata)
    assert differences == []
    database.close()


def test_the_newest_revision_is_alembics(database: Database) -> None:
    """What the service reads without Alembic is what Alembic says."""
    config = Config()
    config.set_main_option("script_location", str(migrations_folder()))
    assert head() == ScriptDirectory.from_config(config).get_current_head()
    with database.read() as connection:
        assert revision_of(database) == MigrationContext.configure(connection).get_current_revision()
    database.close()


def test_a_database_of_today_is_opened_without_alembic(database: Database) -> None:
    database.close()
    script = (
        "import sys; sys.modules['alembic'] = None\n"
        "from planner_service.platform.database import Database\n"
        "from planner_service.platform.migrations import upgrade\n"
        f"upgrade(Database({database.url.render_as_string(hide_password=False)!r}))"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_revisions_import_nothing_that_may_change() -> None:
    for path in (*migrations_folder().glob("versions/*.py"), *migrations_folder().glob("frozen/*.py")):
        assert not re.search(r"^\s*(?:from|import) (?:planner_service|worker_agent)", path.read_text(), re.MULTILINE), (
            path
        )


def test_the_constraints_are_the_declared_ones(database: Database, empty_database_url: str) -> None:
    """What the comparison does not see: checks, keys and what they are called."""
    declared = Database(empty_database_url)
    with declared.write() as connection:
        metadata.create_all(connection)
    for table in metadata.tables:
        found = [_constraints(made, table) for made in (database, declared)]
        assert found[0] == found[1]
    database.close()
    declared.close()


def _constraints(database: Database, table: str) -> tuple[object, ...]:
    inspector = inspect(database.engine)
    unique = sorted(str(sorted(u.items(), key=str)) for u in inspector.get_unique_constraints(table))
    foreign = sorted(str(sorted(f.items(), key=str)) for f in inspector.get_foreign_keys(table))
    checks = [(check["name"], check["sqltext"]) for check in inspector.get_check_constraints(table)]
    return unique, foreign, checks, inspector.get_pk_constraint(table)


def test_they_run_down_and_up_again_with_data_in_the_tables(database: Database) -> None:
    context = Context(database=database, solve=halve)
    jobs.enqueue(context, PROFILE_TASK)
    jobs.enqueue(context, run_task(store_plan(context)))
    downgrade(database, "base")
    assert revision_of(database) is None
    assert set(inspect(database.engine).get_table_names()) <= {"alembic_version"}
    upgrade(database)
    assert revision_of(database) == head()
    jobs.enqueue(context, run_task(store_plan(context)))
    database.close()


def test_an_upgrade_of_what_is_up_to_date_changes_nothing(database: Database) -> None:
    context = Context(database=database, solve=halve)
    plan_id = store_plan(context)
    upgrade(database)
    assert store_plan(context) == plan_id
    database.close()


@pytest.mark.each_case
def test_several_processes_may_upgrade_at_once(empty_database_url: str) -> None:
    command = [*PIPEPLAN, "db", "upgrade", "--database", empty_database_url]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment()) for _ in range(4)]
    ends = [(process.communicate()[1], process.returncode) for process in processes]
    assert [status for _, status in ends] == [0] * len(ends), ends
    database = Database(empty_database_url)
    assert revision_of(database) == head()
    database.close()


def test_several_threads_may_upgrade_at_once(empty_database_url: str) -> None:
    databases = [Database(empty_database_url) for _ in range(4)]
    start = threading.Barrier(len(databases))

    def run(database: Database) -> str | None:
        start.wait()
        upgrade(database)
        revision = revision_of(database)
        database.close()
        return revision

    with ThreadPoolExecutor(len(databases)) as pool:
        assert set(pool.map(run, databases)) == {head()}


def test_a_database_of_a_newer_version_is_refused_in_a_sentence(database: Database, tmp_path: Path) -> None:
    with database.write() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(ServiceError, match=r"is of a newer release \(revision 9999\)"):
        upgrade(database)
    with pytest.raises(ServiceError, match="is of a newer release"):
        downgrade(database, "0001")
    database.close()
    url = database.url.render_as_string(hide_password=False)
    for command in (
        ("serve", "--port", "0"),
        ("db", "upgrade"),
        ("db", "downgrade", "0001"),
        ("db", "backup", str(tmp_path / "backup.sqlite3")),
        ("db", "prune", "--older-than", "1d"),
        ("token", "list"),
        ("token", "create", "--name", "ci", "--scope", "plan"),
    ):
        ended = pipeplan(*command, PIPEPLAN_DATABASE_URL=url)
        assert ended.returncode != 0, command
        assert "is of a newer release (revision 9999)" in ended.stderr, (command, ended.stderr)
        assert "db downgrade" in ended.stderr and "Traceback" not in ended.stderr


def test_a_database_that_is_refused_is_closed(database: Database) -> None:
    """No server starts that would close its connections."""
    with database.write() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    settings = Settings(database_url=database.url.render_as_string(hide_password=False))
    context = create_app(settings).state.context
    with pytest.raises(ServiceError, match="newer release"):
        prepare(settings, context)
    with pytest.raises(UnavailableError, match="has closed its database"), context.database.read():
        pass


def test_a_file_is_durable_and_keeps_its_references(sqlite_url: str) -> None:
    database = Database(sqlite_url)
    with database.read() as connection:
        pragmas = {
            name: connection.execute(text(f"PRAGMA {name}")).scalar_one()
            for name in ("journal_mode", "synchronous", "foreign_keys")
        }
    assert pragmas == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}
    database.close()


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "nonsense"])
def test_a_database_must_be_a_file(url: str) -> None:
    with pytest.raises(InvalidInputError, match="database_url"):
        Database(url)


def test_a_file_that_is_no_database_is_refused_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "letter.sqlite3"
    path.write_text("Dear all, this is no database, but it is long enough to be taken for one. " * 20)
    database = Database(f"sqlite:///{path}")
    with pytest.raises(ServiceError, match="not a database"):
        upgrade(database)
    database.close()


def test_the_migrations_are_beside_the_package_or_in_it() -> None:
    assert (migrations_folder() / "versions" / "0001_first_tables.py").is_file()


def test_prices_are_read_off_the_documents_and_documents_keep_their_ids_both_ways(database: Database) -> None:
    """Before 0005 the columns held the closed form's figures, and documents had them among their own."""
    context = Context(database=database, solve=halve)
    without = replace(context, solve=halve_unplayed)
    ids = [store_plan(context), store_plan(without, batch_size=32)]
    found = [plans.get(context, plan_id) for plan_id in ids]

    downgrade(database, "0004")
    columns = text("SELECT id, content, throughput_samples_per_s, bubble_fraction FROM plans ORDER BY sequence")
    with database.read() as connection:
        earlier = connection.execute(columns).all()
    assert [tuple(row)[2:] for row in earlier] == [(80.0, 0.05), (80.0, 0.05)]
    for row in earlier:
        document = json.loads(row.content)
        assert "closed_form" not in document
        assert (document["id"], document["throughput_samples_per_s"]) == (row.id, 80.0)
        assert (document["time_per_microbatch_s"], document["bubble_fraction"]) == (0.025, 0.05)
        (other,) = document["alternatives"]
        assert other["throughput_samples_per_s"] == 50.0 and "closed_form_samples_per_s" not in other

    upgrade(database)
    with database.read() as connection:
        today = connection.execute(columns).all()
    assert [(row.id, row.content) for row in today] == [(row.id, row.content) for row in earlier]
    assert [tuple(row)[2:] for row in today] == [(60.0, 0.1), (None, None)]
    assert [plans.get(context, plan_id) for plan_id in ids] == found
    for plan_id in ids:
        summary = plans.summary(context, plan_id)
        assert (summary.closed_form_samples_per_s, summary.closed_form_bubble_fraction) == (80.0, 0.05)
    assert [store_plan(context), store_plan(without, batch_size=32)] == ids
    assert len(plans.newest(context, Cut()).items) == 2
    database.close()


def test_clusters_of_before_name_every_type_after_the_upgrade(database: Database) -> None:
    """Before 0010 lists knew the first type only."""
    context = Context(database=database, solve=halve)
    plan_id = store_plan(context)
    types = [replace(CLUSTER.device, name=name) for name in ('A "100"', "V100")]
    groups = tuple(DeviceGroup(device=types[kind], count=count) for kind, count in ((0, 3), (1, 2), (0, 5)))
    mixed = Cluster(groups=groups, levels=(Level(size=10, bandwidth_bytes_per_s=1e9),))
    stored, _ = clusters.create(context, mixed)
    before = clusters.page(context, ClusterQuery()), plans.summary(context, plan_id)
    assert stored.device_types == '8 x A "100" + 2 x V100'

    downgrade(database, "0009")
    upgrade(database)
    assert (clusters.page(context, ClusterQuery()), plans.summary(context, plan_id)) == before
    assert before[1].device_types == f"{CLUSTER.devices} x {CLUSTER.device.name}"
    database.close()


def test_runs_keep_their_timelines_and_losses_on_the_way_down_and_up(database: Database) -> None:
    """Between 0002 and 0003 they move from the documents into chunks, and back."""
    context = Context(database=database, solve=halve)
    plan_id = store_plan(context)
    job = jobs.enqueue(context, run_task(plan_id))
    unmeasured = jobs.enqueue(context, run_task(plan_id))
    lease = jobs.lease(context, ANY_WORK)
    assert lease is not None
    result = run_result(plans.get(context, plan_id))
    jobs.complete(context, lease.job.id, Completion(token=lease.token, result=result))

    downgrade(database, "0002")
    with database.read() as connection:
        rows = connection.execute(text("SELECT id, report, timeline FROM runs")).all()
    documents = {row.id: row for row in rows}
    assert documents[job.run_id].timeline == canonical_json(result.timeline)
    assert documents[job.run_id].report == canonical_json(result.report)
    assert documents[unmeasured.run_id].report is None

    upgrade(database)
    assert job.run_id is not None
    assert runs.timeline(context, job.run_id) == result.timeline
    assert runs.get(context, job.run_id).report == result.report
    database.close()
