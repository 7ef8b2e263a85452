"""The server: an OpenAI-compatible endpoint on top of the built-in engine, with metrics and a web page.

Read the modules in this order: ``settings``, ``driver`` (the engine's thread), ``protocol`` (request bodies),
``prompts`` and ``sessions`` (the engine's input), ``answers`` and ``completions`` (its output), ``app`` (puts the parts
together), ``server`` (start and stop). The required packages come with the extra ``serve``.
"""
