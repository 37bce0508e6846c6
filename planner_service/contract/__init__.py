"""The wire: documents in and out, requests, jobs and leases. Core dataclasses are validated as they are."""
