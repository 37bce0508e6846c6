"""The planner exact: problems that no recurrence expresses, by OR-tools' CP-SAT."""
