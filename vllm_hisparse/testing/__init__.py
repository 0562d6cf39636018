"""What tests, examples and the demo share. Not used by the plugin itself."""
