"""SnapStream as an out-of-tree plugin of an unmodified vLLM.

Read in this order: ``pages`` (the arithmetic that scheduler and worker share), ``settings`` (what a user may ask for),
``plugin`` (the only functions of vLLM that are wrapped), ``blocks`` and ``scheduler`` (the engine core's side), then
``step``, ``paged``, ``layers``, ``runner`` and ``worker`` (the worker's side). Nothing here is imported until vLLM
loads the plugin.
"""
