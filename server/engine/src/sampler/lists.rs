//! Bans tokens according to the token lists of a request.

use server_scheduler::TokenId;

/// Bans all tokens except `allowed`, which must be in ascending order.
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

/// The last token of each bad word whose other tokens are at the end of `recent`.
pub(super) fn completing<'a>(
    words: &'a [Vec<TokenId>],
    recent: &'a [TokenId],
) -> impl Iterator<Item = TokenId> + use<'a> {
    words.iter().filter_map(move |word| {
        word.split_last().filter(|(_, before)| recent.ends_with(before)).map(|(last, _)| *last)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bans_all_but_the_allowed_tokens() {
        let remaining = |allowed: &[TokenId]| {
            let mut logits = [1.0; 5];
            ban_others(&mut logits, allowed);
            (0..)
                .zip(logits)
                .filter(|(_, logit)| *logit == 1.0)
                .map(|(token, _)| token)
                .collect::<Vec<TokenId>>()
        };
        assert_eq!(remaining(&[0, 2, 2, 4]), [0, 2, 4]);
        assert_eq!(remaining(&[3]), [3]);
        assert_eq!(remaining(&[]), Vec::<TokenId>::new());
        assert_eq!(remaining(&[1, 5, 9]), [1], "tokens outside of the vocabulary are ignored");
    }

    #[test]
    fn bans_the_last_token_of_a_bad_word_after_its_beginning() {
        let words = [vec![7], vec![1, 2], vec![1, 1, 3]];
        let banned = |recent: &[TokenId]| completing(&words, recent).collect::<Vec<_>>();
        assert_eq!(banned(&[]), [7]);
        assert_eq!(banned(&[1]), [7, 2]);
        assert_eq!(banned(&[5, 1, 1]), [7, 2, 3]);
        assert_eq!(banned(&[1, 5]), [7]);
    }
}
