"""The methods of choosing tokens, one file each; :mod:`snapstream.config.policy` knows them by name.

``attention`` is no method: it is what those that vote by attention have in common.
"""
