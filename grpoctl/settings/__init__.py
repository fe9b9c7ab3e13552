"""Every setting, declared once, and how flags, environment and files become one checked job."""
