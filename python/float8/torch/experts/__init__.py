"""Expert linears: the linears of a mixture of experts, whose rows lie one expert after the other."""
