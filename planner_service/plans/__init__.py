"""Plans: requested, searched in solvers, stored, compared, exported."""
