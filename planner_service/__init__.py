"""pipeplan's service side: the pure core, the planners, storage, API, dashboard and the `pipeplan` command."""
