"""The server: an OpenAI-compatible endpoint over the built-in engine, its metrics and its page.

Read in this order: ``settings`` (what can be set), ``driver`` (the engine's thread), ``protocol`` (what a request may
say), ``prompts`` and ``sessions`` (what the engine reads), ``answers`` and ``completions`` (what it says), ``app`` (the
routes), ``server`` (start and stop). The packages it needs come with the extra ``serve``.
"""
