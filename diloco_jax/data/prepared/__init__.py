"""Prepared folders: packed rows in ArrayRecord files, beside a manifest of them."""
