"""The version, in one place: the build, the envelope and the API read it here."""

__version__ = "0.1.0"
