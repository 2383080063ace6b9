// The threshold of top-p, and that of all filters in their order.

// All entries of less weight than (1 - top_p) * total / vocab together lack what may be left out.
static float nucleus_floor(const FilteredRow& row, double top_p, double total, float floor) {
  const double least_weight = (1.0 - top_p) * total / static_cast<double>(row.row.vocab) * (1.0 - 1e-5);
  double bound = row.row_max + row.law.temperature * log(least_weight);
  if (row.row.is_probs) bound = row.row_max * pow(least_weight, row.law.temperature);
  const float float_bound = floor_to_float(bound);
  return float_bound > floor ? float_bound : floor;
}

static Selection find_nucleus(const FilteredRow& row, Measured measured, double top_p, double total, float kept) {
  const double wanted = top_p * total;
  const float floor = nucleus_floor(row, top_p, total, kept);
  if (row.row.vocab > CAPACITY) {
    const float sampled = sampled_mass_floor(row, floor, (1.0 - top_p) * total);
    const Selection found = find_threshold(row, measured, sampled, wanted);
    if (found.reached >= wanted || !(sampled > floor)) return found;
  }
  return find_threshold(row, measured, floor, wanted);
}

// Whether float32 weights suffice to tell that the selection is the threshold.
static inline bool beyond_doubt(const Selection& found, double wanted, double total) {
  const double margin = MASS_ERROR * total;
  return found.above < wanted - margin && found.reached > wanted + margin;
}

// Threshold of top-p among the entries >= kept. `total` is their mass by float32 weights, or NaN if unknown.
static float top_p_threshold(const FilteredRow& row, double top_p, float kept, double total) {
  const int64_t count = gather(row, kept, static_cast<float>(row.row_max));
  if (count >= 0) {
    weigh_values(row, Measured::EXACT_MASS, row.scratch.candidates, count, row.scratch.measures);
    const double wanted = top_p * fixed_sum(row.scratch.measures, count);
    return select<false>(row.scratch.candidates, row.scratch.measures, count, 0.0, wanted).value;
  }
  if (!(total > 0.0)) total = measure_above(row, Measured::MASS, kept);
  const Selection found = find_nucleus(row, Measured::MASS, top_p, total, kept);
  if (beyond_doubt(found, top_p * total, total)) return found.value;
  total = measure_above(row, Measured::EXACT_MASS, kept);
  return find_nucleus(row, Measured::EXACT_MASS, top_p, total, kept).value;
}

static double min_p_threshold(const FilteredRow& row, const Parameters& parameters) {
  if (!(parameters.min_p > 0.0)) return -__builtin_inf();
  return row.row.is_probs ? row.row_max * pow(parameters.min_p, parameters.temperature)
                          : row.row_max + parameters.temperature * log(parameters.min_p);
}

// `total` is the mass of the whole row if it was summed, else NaN.
static double filter_threshold(const FilteredRow& row, const Parameters& parameters, double total) {
  float threshold = -__builtin_inff();
  if (parameters.top_k < row.row.vocab) threshold = top_k_threshold(row, parameters.top_k);
  if (parameters.top_p < 1.0) threshold = top_p_threshold(row, parameters.top_p, threshold, total);
  const double least = min_p_threshold(row, parameters);
  return least > threshold ? least : threshold;
}
