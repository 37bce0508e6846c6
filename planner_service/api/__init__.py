"""The REST API: routes, bodies, problem details, OpenAPI."""
