"""Protocol: everything that crosses HTTP between the service, its agents and its clients."""
