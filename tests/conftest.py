"""What holds of all tests."""

from hypothesis import settings

settings.register_profile("pipeplan", deadline=None)  # a busy machine is no failure
settings.load_profile("pipeplan")
