"""Rewards and advantages."""
