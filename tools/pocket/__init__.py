"""How the embedded demo model is made: phrases, training, export, evaluation."""
