"""enginewire: the client layer between LLM frontends and engines, both ends of the wire."""
