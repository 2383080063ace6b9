// Drawing a draft token: statistics of the row, one inverse CDF, and the receipt that spares verify the row's sweep.

static void sample_sequence(const SampleArguments& arguments, int64_t sequence, Executor executor) {
  int32_t status = 0;
  Sampled sampled;
  sampled.parameters = read_parameters(arguments.sampling, sequence, arguments.vocab, &status);
  double* receipt = arguments.receipt + sequence * RECEIPT_FIELDS;
  for (int field = 0; field < RECEIPT_FIELDS; ++field) receipt[field] = __builtin_nan("");
  arguments.token_ids[sequence] = PLACEHOLDER_TOKEN_ID;
  arguments.status[sequence] = status;
  if (status) return;

  Workspace workspace = make_workspace(arguments.vocab, sampled.parameters.filtered);
  sampled.row =
      row_at(arguments.logits, arguments.vocab, sequence, 0, adjustment_at(arguments.adjustments, sequence, 0));
  sampled.law = make_law(false, sampled.parameters.temperature);
  RowStatistics& statistics = sampled.statistics;
  statistics.shard_largest = workspace.target_largest;
  statistics.shard_mass = workspace.target_mass;
  row_statistics(sampled.row, sampled.law, sampled.parameters, executor, workspace, nullptr, &statistics);
  if (statistics.valid) {
    const uint64_t seed = static_cast<uint64_t>(read_integer(arguments.seed, sequence));
    const uint64_t position = static_cast<uint64_t>(read_integer(arguments.position, sequence));
    const int64_t token = draw_from_row(sampled, philox_uniforms(seed, position, DRAFT_PURPOSE).emission);
    arguments.token_ids[sequence] = token;
    receipt[0] = value_at(sampled.row, token);
    receipt[1] = statistics.row_max;
    receipt[2] = statistics.threshold;
    receipt[3] = statistics.weight_sum;
  } else {
    arguments.status[sequence] = TARGET_INVALID;
  }
  free_workspace(workspace);
}
