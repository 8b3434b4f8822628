"""From a recipe to a folder of heads: the target writes, the heads learn, accuracies are measured, a tree is fitted."""
