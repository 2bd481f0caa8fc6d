"""One file for each tracking service, each a Tracker."""
