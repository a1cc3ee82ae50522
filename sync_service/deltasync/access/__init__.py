"""Access control: roles, TLS, limits and the audit log."""
