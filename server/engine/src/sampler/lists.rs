//! Tokens that a request rules out by lists of its own.

use server_scheduler::TokenId;

/// Bans all tokens but those `allowed`, which ascend.
pub(super) fn ban_others(logits: &mut [f32], allowed: &[TokenId]) {
    let mut start = 0;
    for &token in allowed {
        let token = (token as usize).min(logits.len());
        if start < token {
            logits[start..token].fill(f32::NEG_INFINITY);
        }
        start = start.max(token + 1);
    }
    if let Some(rest) = logits.get_mut(start..) {
        rest.fill(f32::NEG_INFINITY);
    }
}

/// The last tokens of the runs whose others are the end of `recent`.
pub(super) fn completing<'a>(
    runs: &'a [Vec<TokenId>],
    recent: &'a [TokenId],
) -> impl Iterator<Item = TokenId> + use<'a> {
    runs.iter().filter_map(move |run| {
        run.split_last().filter(|(_, before)| recent.ends_with(before)).map(|(last, _)| *last)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_allowed_is_left() {
        let left = |allowed: &[TokenId]| {
            let mut logits = [1.0; 5];
            ban_others(&mut logits, allowed);
            (0..)
                .zip(logits)
                .filter(|(_, logit)| *logit == 1.0)
                .map(|(token, _)| token)
                .collect::<Vec<TokenId>>()
        };
        assert_eq!(left(&[0, 2, 2, 4]), [0, 2, 4]);
        assert_eq!(left(&[3]), [3]);
        assert_eq!(left(&[]), Vec::<TokenId>::new());
        assert_eq!(left(&[1, 5, 9]), [1], "what is not in the vocabulary is passed over");
    }

    #[test]
    fn a_run_is_completed_only_where_its_beginning_stands() {
        let runs = [vec![7], vec![1, 2], vec![1, 1, 3]];
        let banned = |recent: &[TokenId]| completing(&runs, recent).collect::<Vec<_>>();
        assert_eq!(banned(&[]), [7]);
        assert_eq!(banned(&[1]), [7, 2]);
        assert_eq!(banned(&[5, 1, 1]), [7, 2, 3]);
        assert_eq!(banned(&[1, 5]), [7]);
    }
}
