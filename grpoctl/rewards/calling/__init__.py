"""Calling rewards: in children that can be killed, one typed outcome a completion."""
