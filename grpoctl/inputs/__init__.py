"""What a user brings: policies, prompts, preferences, reward models; opened, checked, known by digest."""
