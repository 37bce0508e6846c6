"""The planner exact: what no recurrence expresses, by OR-tools' CP-SAT."""
