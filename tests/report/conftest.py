"""A browser for the tests of the page."""

from tests.support.browser import browser, pictures

__all__ = ["browser", "pictures"]
