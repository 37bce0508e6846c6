"""Plans: asked for, searched in solvers, stored, compared, exported."""
