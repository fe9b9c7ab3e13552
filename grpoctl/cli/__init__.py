"""The command line: options rendered from the settings, results as lines or JSON, errors as exit codes."""
