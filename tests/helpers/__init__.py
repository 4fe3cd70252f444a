"""Shared set-ups, references and processes of the tests."""
