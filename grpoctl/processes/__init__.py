"""Processes: who this one is, how others are started, followed and ended, and what goes over a pipe."""
