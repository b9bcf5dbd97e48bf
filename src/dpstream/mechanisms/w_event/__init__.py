"""Histograms under w-event privacy: any events within w successive steps are protected."""
