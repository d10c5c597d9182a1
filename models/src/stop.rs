//! Which tokens end a generation.

use crate::template::ChatTemplate;
use crate::tokenizer::Tokenizer;

/// Tokens that end a turn in the chat formats of the field.
const END_OF_TURN: &[&str] =
    &["<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", END, RETURN, "<end_of_turn>"];

/// Ends a turn in some formats. Where there is [`RETURN`] too, it ends a message of a turn, behind which the next one of
/// the same turn begins: reasoning, then the answer.
const END: &str = "<|end|>";
const RETURN: &str = "<|return|>";

/// Whether `text` ends a turn in a chat template.
fn ends_turn(text: &str, template: &str) -> bool {
    template.contains(text) && !(text == END && template.contains(RETURN))
}

/// All stop ids, ascending: the ones the checkpoint lists, and the special tokens with which its chat
/// template ends a turn.
pub(crate) fn stop_ids(
    listed: impl IntoIterator<Item = u32>,
    tokenizer: &Tokenizer,
    template: Option<&ChatTemplate>,
) -> Vec<u32> {
    let from_template = END_OF_TURN
        .iter()
        .filter(|text| template.is_some_and(|template| ends_turn(text, template.source())))
        .filter_map(|text| tokenizer.token_id(text))
        .filter(|&id| tokenizer.is_special(id));
    let mut ids: Vec<u32> = listed.into_iter().chain(from_template).collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}
