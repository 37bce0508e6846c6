"""What holds of all tests."""

import signal

from hypothesis import settings

settings.register_profile("pipeplan", deadline=None)  # a busy machine is no failure
settings.load_profile("pipeplan")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background; processes under test inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
