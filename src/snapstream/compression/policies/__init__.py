"""The built-in policies, one file each; :mod:`snapstream.config.policy` finds them by name.

``attention`` is not a policy: it holds what the policies that vote by attention share.
"""
