"""Creation of the embedded demo model: phrases, training, export, evaluation."""
