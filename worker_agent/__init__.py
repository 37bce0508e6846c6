"""pipeplan's worker side: models, the profiler, the pipeline runtime and the `pipeplan-agent` command."""
