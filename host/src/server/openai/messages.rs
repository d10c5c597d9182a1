//! Chat messages: checks, and the form that templates read.

use serde_json::{Map, Value};

use super::super::error::ApiError;
use super::super::fields::{name_of, show};

const ROLES: &[&str] = &["system", "developer", "user", "assistant", "tool", "function"];

/// Checks `messages` and brings every content into plain text. `knows_developer` says whether
/// the template has a word for the role `developer`; else it is the system's.
///
/// # Errors
/// 400 that names the place.
pub(super) fn normalise(messages: Value, knows_developer: bool) -> Result<Value, ApiError> {
    let Value::Array(messages) = messages else {
        return Err(ApiError::field("messages", format!("takes a list of messages; found {}", name_of(&messages))));
    };
    if messages.is_empty() {
        return Err(ApiError::field("messages", "takes at least one message"));
    }
    let messages: Result<Vec<_>, _> = messages
        .into_iter()
        .enumerate()
        .map(|(at, message)| one(&format!("messages[{at}]"), message, knows_developer))
        .collect();
    Ok(Value::Array(messages?))
}

fn one(path: &str, message: Value, knows_developer: bool) -> Result<Value, ApiError> {
    let Value::Object(mut message) = message else {
        return Err(ApiError::field(path, format!("takes an object with role and content; found {}", show(&message))));
    };
    let role = match message.get("role") {
        Some(Value::String(role)) if ROLES.contains(&role.as_str()) => role.clone(),
        other => {
            return Err(ApiError::field(
                format!("{path}.role"),
                format!(
                    "takes one of {}; found {}",
                    ROLES.join(", "),
                    other.map_or_else(|| "nothing".to_owned(), show)
                ),
            ));
        }
    };
    if role == "developer" && !knows_developer {
        message.insert("role".into(), "system".into());
    }
    let calls = message.get("tool_calls").is_some_and(|calls| !calls.is_null());
    let content = match message.remove("content") {
        Some(Value::String(text)) => Some(text),
        Some(Value::Array(parts)) => Some(join_parts(path, parts)?),
        None | Some(Value::Null) if role == "assistant" => None,
        other => {
            return Err(ApiError::field(
                format!("{path}.content"),
                format!("takes a text or a list of parts; found {}", other.as_ref().map_or("nothing", name_of)),
            ));
        }
    };
    match content {
        Some(text) => message.insert("content".into(), text.into()),
        // Templates join content to strings; only beside tool calls do they expect none.
        None if calls => message.insert("content".into(), Value::Null),
        None => message.insert("content".into(), "".into()),
    };
    if let Some(Value::Array(calls)) = message.get_mut("tool_calls") {
        calls.iter_mut().for_each(open_arguments);
    }
    message.retain(|_, value| !value.is_null() || calls);
    Ok(Value::Object(message))
}

/// Arguments of a tool call come as JSON in a string; templates want the object.
fn open_arguments(call: &mut Value) {
    let Some(arguments) = call.get_mut("function").and_then(|function| function.get_mut("arguments")) else {
        return;
    };
    if let Some(Ok(parsed)) = arguments.as_str().map(serde_json::from_str::<Map<String, Value>>) {
        *arguments = Value::Object(parsed);
    }
}

fn join_parts(path: &str, parts: Vec<Value>) -> Result<String, ApiError> {
    let mut texts = Vec::with_capacity(parts.len());
    for (at, part) in parts.into_iter().enumerate() {
        let here = format!("{path}.content[{at}]");
        match part {
            Value::String(text) => texts.push(text),
            Value::Object(mut part) => match part.get("type").and_then(Value::as_str) {
                Some("text") => match part.remove("text") {
                    Some(Value::String(text)) => texts.push(text),
                    other => {
                        return Err(ApiError::field(
                            format!("{here}.text"),
                            format!("takes a text; found {}", other.as_ref().map_or("nothing", name_of)),
                        ));
                    }
                },
                Some(kind) => {
                    let kind: String = kind.chars().take(40).collect();
                    return Err(ApiError::field(
                        format!("{here}.type"),
                        format!("{kind:?} is not served by this build; only \"text\" is"),
                    )
                    .with_code("unsupported_field"));
                }
                None => {
                    return Err(ApiError::field(format!("{here}.type"), "is missing; \"text\" is served"));
                }
            },
            other => {
                return Err(ApiError::field(here, format!("takes a part with a type; found {}", show(&other))));
            }
        }
    }
    Ok(texts.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn run(messages: Value) -> Result<Value, ApiError> {
        normalise(messages, false)
    }

    #[test]
    fn text_parts_become_text() {
        let messages = run(json!([{"role": "user", "content": [
            {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]));
        assert_eq!(messages.unwrap(), json!([{"role": "user", "content": "a b"}]));
    }

    #[test]
    fn images_are_refused_by_name() {
        let error = run(json!([{"role": "user", "content": [
            {"type": "text", "text": "a"},
            {"type": "image_url", "image_url": {"url": "x"}}]}]))
        .unwrap_err();
        assert_eq!(error.param.as_deref(), Some("messages[0].content[1].type"));
        assert_eq!(error.code, Some("unsupported_field"));
    }

    #[test]
    fn wrong_messages_name_their_place() {
        for (messages, param) in [
            (json!("hello"), "messages"),
            (json!([]), "messages"),
            (json!(["x"]), "messages[0]"),
            (json!([{"role": "user", "content": "a"}, {"content": "a"}]), "messages[1].role"),
            (json!([{"role": "king", "content": "a"}]), "messages[0].role"),
            (json!([{"role": "user"}]), "messages[0].content"),
            (json!([{"role": "user", "content": 3}]), "messages[0].content"),
            (json!([{"role": "user", "content": [{"text": "a"}]}]), "messages[0].content[0].type"),
        ] {
            let error = run(messages).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param));
        }
    }

    #[test]
    fn developer_is_the_system_where_the_template_has_no_word_for_it() {
        let messages = json!([{"role": "developer", "content": "a"}]);
        assert_eq!(run(messages.clone()).unwrap()[0]["role"], "system");
        assert_eq!(normalise(messages, true).unwrap()[0]["role"], "developer");
    }

    #[test]
    fn tool_calls_carry_objects() {
        let messages = run(json!([{"role": "assistant", "content": null, "tool_calls": [
            {"id": "1", "type": "function",
             "function": {"name": "f", "arguments": "{\"x\": 1}"}}]}]))
        .unwrap();
        assert_eq!(messages[0]["tool_calls"][0]["function"]["arguments"], json!({"x": 1}));
        assert_eq!(messages[0]["content"], Value::Null);
    }
}
