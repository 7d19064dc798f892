"""Every number that a run reports, by its name in `metrics.jsonl`, in one sentence each.

A name is missing from a step that has no data for it: no policy metrics while only the value function warms up, no
value metrics for a recipe without one.
"""

from __future__ import annotations

STALENESS_BUCKETS = (
    (0, 0),
    (1, 1),
    (2, 2),
    (3, 3),
    (4, 4),
    (5, 8),
    (9, None),
)  # lowest and highest, in weight versions


def staleness_bucket_name(lowest: int, highest: int | None) -> str:
    """`staleness/tokens_2`, `staleness/tokens_5_to_8`, `staleness/tokens_from_9`."""
    if highest is None:
        return f"staleness/tokens_from_{lowest}"
    return f"staleness/tokens_{lowest}" if lowest == highest else f"staleness/tokens_{lowest}_to_{highest}"


# Why a token has no gradient: rule, side of the ratio that was judged, sign of the advantage.
MASK_RULES = {
    "stale": "staler than the bound",
    "rejected": "rejected by another rule",
    "region": "outside the trust region",
}
MASK_SIDES = {"low": "ratio at most 1", "high": "ratio above 1"}
MASK_SIGNS = {"negative": "advantage at most 0", "positive": "advantage above 0"}


def masked_name(bucket: tuple[int, int | None], rule: str, side: str, sign: str) -> str:
    """`masked/tokens_2_region_high_positive`."""
    return f"masked/{staleness_bucket_name(*bucket).partition('/')[2]}_{rule}_{side}_{sign}"


def _span(lowest: int, highest: int | None) -> str:
    if highest is None:
        return f"{lowest} or more"
    return f"{lowest}" if lowest == highest else f"{lowest} to {highest}"


METRICS: dict[str, str] = {
    "batch/trajectories": "Trajectories that were trained on.",
    "batch/unscorable": "Trajectories left out because their reward is missing or not finite, or nothing was sampled.",
    "batch/tokens": "Tokens of these trajectories: prompts, responses and observations.",
    "batch/sampled_tokens": "Tokens among them that the policy sampled; the denominator of a token mean.",
    "batch/micro_batches": "Forward and backward passes that the batch was cut into.",
    "batch/reward_mean": "Mean reward of a trajectory.",
    "batch/reward_std": "Standard deviation of the trajectories' rewards (n, not n - 1).",
    "batch/truncated_share": "Share of trajectories that were cut at a length limit.",
    "batch/response_tokens_mean": "Mean number of sampled tokens of a trajectory.",
    "batch/groups": "Groups in the batch, for recipes that compare members of a group.",
    "batch/uninformative_groups": "Groups whose rewards do not differ, so that they teach nothing.",
    "batch/offline_trajectories": "Trajectories that only filled the memory of their prompts.",
    "batch/dropped_uninformative": "Trajectories left out because the rewards of their group do not differ.",
    "batch/overlong_penalty_mean": "Mean penalty on the length of a trajectory, already in its reward.",
    "staleness/mean": "Mean staleness of a sampled token: learner's weight version minus the token's.",
    "staleness/max": "Largest staleness of a sampled token.",
    **{
        staleness_bucket_name(lowest, highest): f"Sampled tokens with a staleness of {_span(lowest, highest)}."
        for lowest, highest in STALENESS_BUCKETS
    },
    "policy/updates": "Optimizer updates of the policy on this batch.",
    "policy/loss": "Policy loss of the whole batch with all its terms; the mean over its updates.",
    "policy/grad_norm": "Euclidean norm of the policy's gradient before clipping, in the last update on this batch.",
    "policy/learning_rate": "Step size of the policy, in the last update on this batch.",
    "policy/tokens": "Sampled tokens that the policy loss counts, in all updates on this batch together.",
    "policy/rejected_tokens": "Of these, tokens that are staler than the bound, or that another rule rejects.",
    "policy/masked_tokens": "Of these, other tokens without gradient: their ratio is outside the trust region.",
    "policy/masked_low_tokens": "Masked tokens whose ratio is below 1: they have become less likely.",
    "policy/masked_high_tokens": "Masked tokens whose ratio is above 1: they have become more likely.",
    "policy/masked_positive_tokens": "Masked tokens whose advantage is positive.",
    "policy/masked_negative_tokens": "Masked tokens whose advantage is negative.",
    "policy/log_ratio_abs_mean": "Mean absolute log ratio of the current policy to the one that sampled, in nats.",
    "policy/log_ratio_square_mean": "Mean squared log ratio of the current policy to the one that sampled, in nats².",
    "policy/nonfinite_tokens": "Sampled tokens whose ratio to the sampling policy is not finite; they are masked.",
    "policy/log_ratio_abs_max": "Largest absolute log ratio of the current policy to the one that sampled, in nats.",
    "policy/kl_behaviour": "KL divergence from the sampling policy to the current one, k3 estimate, in nats a token.",
    "policy/entropy_estimate": "Minus the mean log-prob of the sampled tokens under the current policy, in nats.",
    "policy/entropy": "Exact entropy of the current policy, in nats a token; computed when it is part of the loss.",
    "policy/advantage_mean": "Mean advantage over sampled tokens.",
    "policy/advantage_std": "Standard deviation of the advantage over sampled tokens.",
    "policy/effective_samples_share": "Share of trajectories that count, by their ratios to the sampling policy.",
    "policy/grad_cosine": "Cosine of the gradients of the last two updates; stale data makes it large.",
    "policy/step_log_ratio_mean": "Mean absolute log ratio, after to before the updates, on a few trajectories.",
    "policy/step_log_ratio_max": "Largest absolute log ratio, after to before the updates, on a few trajectories.",
    "policy/step_over_bound_max": "Largest of these over the trust region's log bound; above 1: outside it.",
    "policy/kl_reference": "Divergence from the starting model, in nats a token, by the recipe's estimate of it.",
    "policy/nll": "Minus the mean log-prob of the tokens of correct trajectories, in nats.",
    "policy/implicit_error": "Mean squared error of a trajectory's implicit value.",
    **{
        masked_name(bucket, rule, side, sign): (
            f"Of staleness {_span(*bucket)}: {MASK_RULES[rule]}, {MASK_SIDES[side]}, {MASK_SIGNS[sign]}."
        )
        for bucket in STALENESS_BUCKETS
        for rule in MASK_RULES
        for side in MASK_SIDES
        for sign in MASK_SIGNS
    },
    "value/loss": "Mean squared error of the value function in its last update on this batch.",
    "value/grad_norm": "Norm of the value function's gradient before clipping, in its last update on this batch.",
    "value/explained_variance": "1 - Var(return - value) / Var(return), with values from before this batch.",
    "value/mean": "Mean value of the states before sampled tokens, before learning from this batch.",
    "value/return_mean": "Mean of the value function's targets.",
    "value/bias_first_third": "Mean value minus return over the first third of trajectories, before learning.",
    "value/bias_middle_third": "The same over the middle third.",
    "value/bias_last_third": "The same over the last third.",
    "value/grad_norm_head": "The scalar head's part of that norm.",
    "value/grad_norm_embeddings": "The embeddings' part of that norm.",
    "value/grad_norm_attention": "The attention's part of that norm.",
    "value/grad_norm_mlp": "The feed-forward layers' part of that norm.",
    "value/grad_norm_norm": "The part of everything else, which is normalisation layers.",
    "time/wait_s": "Seconds until the batch was there.",
    "time/update_s": "Seconds from the batch to the end of its update.",
    "time/prepare_s": "Seconds to bring the batch into flat form.",
    "time/value_s": "Seconds of value updates and of computing values and advantages.",
    "time/scores_s": "Seconds of passes before the updates: proximal log-probs and the starting model.",
    "time/policy_s": "Seconds of the policy update.",
    "time/publish_s": "Seconds to publish the new weights.",
    "eval/reward_mean": "Mean reward over the held-out prompts that have one.",
    "eval/count": "Held-out prompts with a reward.",
    "eval/unscorable": "Held-out prompts without one: not scored, over-long, or failed.",
    "eval/length_mean": "Mean number of sampled tokens of a held-out prompt's response.",
    "eval/truncated": "Held-out responses that were cut at a length limit.",
    "buffer/issued": "Samples issued so far; at every moment the sum of all states below.",
    "buffer/queued": "Samples that wait for another attempt.",
    "buffer/leased": "Samples that an actor works on.",
    "buffer/assembling": "Delivered samples whose group is not whole yet.",
    "buffer/ready": "Samples that may be trained on.",
    "buffer/in_training": "Samples of the open batch.",
    "buffer/trained": "Samples that were trained on.",
    "buffer/dropped_stale": "Samples dropped because nothing of their unit was fresh enough.",
    "buffer/dropped_incomplete_group": "Samples dropped because their group had too few members left.",
    "buffer/dropped_unscorable": "Samples dropped because they have no finite reward.",
    "buffer/dropped_empty": "Samples dropped because nothing was sampled.",
    "buffer/dropped_over_long": "Samples dropped because their prompt is longer than rollout.max_prompt_tokens.",
    "buffer/dropped_failed": "Samples dropped because every attempt failed.",
    "buffer/dropped_no_update": "Samples of batches that brought no update.",
    "buffer/held_bytes": "Bytes of delivered trajectories that are held.",
    "buffer/length_bias": "Mean length of what was trained over that of what was delivered; below 1, long ones lose.",
    "buffer/late_deliveries": "Deliveries refused because their lease was void.",
    "buffer/duplicate_deliveries": "Deliveries refused because they had been made before.",
    "buffer/lost_leases": "Leases that went back because their actor died, fell silent, or gave them back.",
    "buffer/expired_leases": "Leases that ran into their deadline.",
    "buffer/retries": "Failed attempts that were tried again.",
    "buffer/returned_by_restore": "Samples ready again because their batch is not in the restored weights.",
    "buffer/beyond_bound_prompts": "Prompts dropped as stale since they were last trained, 1000 at most; the log names "
    "them.",
    "buffer/trained_length_mean": "Mean sampled tokens of the samples that were trained on.",
    "buffer/trained_duration_mean_s": "Mean seconds from lease to delivery of the samples that were trained on.",
    "buffer/trained_staleness_max": "Largest staleness of a sample when its batch was formed, by its oldest token.",
    "buffer/dropped_stale_length_mean": "Mean sampled tokens of the samples dropped as stale.",
    "buffer/dropped_stale_duration_mean_s": "Mean seconds from lease to delivery of the samples dropped as stale.",
    "buffer/dropped_stale_staleness_max": "Largest staleness of a sample when it was dropped as stale.",
}
