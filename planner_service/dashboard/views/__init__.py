"""A file a page, beside its template: what is asked of the services, and how it is arranged."""
