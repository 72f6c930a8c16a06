"""Who answers: models behind one narrow interface."""
