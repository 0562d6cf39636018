"""For all tests."""

from hypothesis import settings

settings.register_profile("tests", deadline=None)  # no test fails for being slow: machines differ
settings.load_profile("tests")
