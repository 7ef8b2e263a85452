"""SnapStream as an out-of-tree plugin of an unmodified vLLM.

Read in this order: ``pages`` (the arithmetic that scheduler and worker share), ``settings`` (what a user may ask for),
``plugin`` (the only code of vLLM that is wrapped), ``blocks`` and ``scheduler`` (the engine core's side), then
``step``, ``paged``, ``layers``, ``runner`` and ``worker`` (the worker's side). Nothing here is imported unless vLLM
asks for it.
"""
