"""Parsers of tool calls and of reasoning, as plugins."""
