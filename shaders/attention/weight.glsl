// The weight of a row by its score and the maximum so far: 0 where the score is MASKED, and NaN or infinity where it is no number or -infinity,
// so that keys beyond the range of their cache cannot drop out of the softmax unseen. Logits are in base 2.
float weight_of(float score, float score_max) { return score > MASKED ? exp2(score - score_max) : MASKED - score; }
