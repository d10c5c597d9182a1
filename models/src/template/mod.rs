//! Chat templates: messages to prompt text.
//!
//! Templates are written for Jinja2 in Python. They run here in minijinja, with the
//! functions, filters and string methods that templates in the field use, and with values printed as Python
//! prints them.

mod python;
mod tags;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, Error, ErrorKind, Value};

use crate::ModelError;

const NAME: &str = "chat_template";
/// Instructions one rendering may take: far above what a long conversation needs, and the end
/// of a template that loops for ever.
const FUEL: u64 = 50_000_000;

/// A compiled chat template.
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// Where the template came from, for messages.
    origin: String,
    source: String,
    knows_developer: bool,
    bos_token: String,
    eos_token: String,
}

impl ChatTemplate {
    /// Compiles `source`. `origin` says where it came from (a file, a key); `bos_token` and `eos_token` are
    /// what the template sees under these names, empty where the model has none.
    ///
    /// # Errors
    /// [`ModelError::Template`] when the source is no template.
    pub fn new(
        origin: impl Into<String>,
        source: impl Into<String>,
        bos_token: impl Into<String>,
        eos_token: impl Into<String>,
    ) -> Result<Self, ModelError> {
        let (origin, source) = (origin.into(), source.into());
        let mut environment = Environment::new();
        environment.set_syntax(
            SyntaxConfig::builder()
                .trim_blocks(true)
                .lstrip_blocks(true)
                .build()
                .map_err(|error| template_error(&origin, &error))?,
        );
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(python::method);
        environment.set_formatter(python::print);
        environment.add_filter("tojson", python::to_json);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment
            .add_template_owned(NAME, tags::without_generation_marks(&source))
            .map_err(|error| template_error(&origin, &error))?;
        // Asked with every request, and some templates are long.
        let knows_developer = source.contains("developer");
        let (bos_token, eos_token) = (bos_token.into(), eos_token.into());
        Ok(Self { environment, origin, source, knows_developer, bos_token, eos_token })
    }

    /// Renders a conversation. `messages` is the array of the request, each message an object with `role` and
    /// `content`. With `add_generation_prompt` the text ends where the assistant's answer begins. `variables`
    /// are further names the template may ask for (`tools`, `enable_thinking`, ...); they hide none of the standard ones.
    ///
    /// # Errors
    /// [`ModelError::Template`] with the template's own words when it refuses the conversation (roles
    /// that do not alternate, for example), or when it fails.
    pub fn render(
        &self,
        messages: &serde_json::Value,
        add_generation_prompt: bool,
        variables: &serde_json::Map<String, serde_json::Value>,
    ) -> Result<String, ModelError> {
        let standard = [
            ("messages", Value::from(Serde(messages))),
            ("add_generation_prompt", Value::from(add_generation_prompt)),
            ("bos_token", Value::from(self.bos_token.as_str())),
            ("eos_token", Value::from(self.eos_token.as_str())),
        ];
        let given = variables.iter().map(|(name, value)| (name.as_str(), Value::from(Serde(value))));
        let context = Value::from_pairs(given.chain(standard));
        self.environment
            .get_template(NAME)
            .and_then(|template| template.render(context))
            .map_err(|error| template_error(&self.origin, &error))
    }

    /// The template's source.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Whether the template has a word for the role `developer`.
    pub fn knows_developer(&self) -> bool {
        self.knows_developer
    }

    /// Where the template came from.
    pub fn origin(&self) -> &str {
        &self.origin
    }
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate").field("origin", &self.origin).finish_non_exhaustive()
    }
}

fn template_error(origin: &str, error: &Error) -> ModelError {
    let mut reason = match (error.kind(), error.detail()) {
        (ErrorKind::OutOfFuel, _) => "it does not come to an end".to_owned(),
        (_, Some(detail)) => detail.to_owned(),
        (kind, None) => kind.to_string(),
    };
    if let Some(line) = error.line() {
        reason.push_str(&format!(" (line {line})"));
    }
    ModelError::Template { template: origin.to_owned(), reason }
}

/// The function templates call to refuse a conversation.
fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

/// The current local time in the words of `strftime`.
fn strftime_now(format: String) -> Result<String, Error> {
    jiff::fmt::strtime::format(&format, &jiff::Zoned::now())
        .map_err(|error| Error::new(ErrorKind::InvalidOperation, format!("strftime_now({format:?}): {error}")))
}

#[cfg(test)]
mod tests;
