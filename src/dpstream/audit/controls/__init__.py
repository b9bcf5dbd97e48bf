"""Forms that are known to be broken, or broken as published: the auditor must catch every one.

They are not registered as mechanisms and never offered for a release.
"""
