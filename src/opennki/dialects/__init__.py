"""The surfaces that users import."""
