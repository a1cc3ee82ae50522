"""Who may do what, and how much: roles, TLS, limits and the audit log."""
