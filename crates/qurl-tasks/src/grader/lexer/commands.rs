//! LaTeX commands: what each one becomes.

use super::{Lexer, Tok, named};
use crate::grader::budget::Stop;
use crate::grader::expr::{BigKind, Constant, RelOp};
use crate::grader::words;

/// What to do with a command.
enum Action {
    /// Becomes a token.
    Emit(Tok),
    /// Spacing and size: nothing.
    Skip,
    /// The argument is text: its letters are words.
    Text,
    /// The argument is mathematics in another font.
    Font,
    /// The argument names an environment.
    Environment(bool),
}

fn action(name: &str) -> Option<Action> {
    use Action::{Emit, Skip};
    Some(match name {
        "left" | "right" | "big" | "Big" | "bigg" | "Bigg" | "bigl" | "bigr" | "Bigl" | "Bigr" | "biggl"
        | "biggr" | "middle" | "displaystyle" | "textstyle" | "scriptstyle" | "limits" | "nolimits"
        | "quad" | "qquad" | "hfill" | "noindent" | "thinspace" | "medspace" | "enspace" | "hline"
        | "small" | "large" | "Large" | "boxed" | "fbox" | "normalsize" | "bf" | "rm" | "it" => Skip,
        "text" | "textbf" | "textit" | "textrm" | "textnormal" | "textsc" | "texttt" | "mbox" | "hbox"
        | "textsf" => Action::Text,
        "mathrm" | "mathbf" | "mathit" | "mathsf" | "mathcal" | "mathfrak" | "mathscr" | "boldsymbol"
        | "bm" | "operatorname" | "mathbb" | "mathop" | "pmb" => Action::Font,
        "begin" => Action::Environment(true),
        "end" => Action::Environment(false),
        "frac" | "dfrac" | "tfrac" | "cfrac" | "nicefrac" | "sfrac" => Emit(Tok::Frac),
        "binom" | "dbinom" | "tbinom" => Emit(Tok::Binom),
        "sqrt" => Emit(Tok::Sqrt),
        "times" | "cdot" | "ast" | "star" | "bullet" | "cdotp" => Emit(Tok::Times),
        "div" => Emit(Tok::Slash),
        "pm" => Emit(Tok::PlusMinus(false)),
        "mp" => Emit(Tok::PlusMinus(true)),
        "pi" => Emit(Tok::Const(Constant::Pi)),
        "infty" | "infin" => Emit(Tok::Const(Constant::Infinity)),
        "circ" | "degree" | "degrees" => Emit(Tok::Degree),
        "prime" => Emit(Tok::Prime),
        "lt" => Emit(Tok::Rel(RelOp::Lt)),
        "gt" => Emit(Tok::Rel(RelOp::Gt)),
        "le" | "leq" | "leqslant" | "leqq" => Emit(Tok::Rel(RelOp::Le)),
        "ge" | "geq" | "geqslant" | "geqq" => Emit(Tok::Rel(RelOp::Ge)),
        "ne" | "neq" => Emit(Tok::Rel(RelOp::Ne)),
        "approx" | "simeq" | "approxeq" | "thickapprox" => Emit(Tok::Rel(RelOp::Approx)),
        "equiv" => Emit(Tok::Rel(RelOp::Equiv)),
        "in" => Emit(Tok::Rel(RelOp::In)),
        "subset" | "subseteq" => Emit(Tok::Rel(RelOp::Subset)),
        "sim" => Emit(Tok::Rel(RelOp::Other('~'))),
        "cong" => Emit(Tok::Rel(RelOp::Other('≅'))),
        "perp" => Emit(Tok::Rel(RelOp::Other('⟂'))),
        "parallel" => Emit(Tok::Rel(RelOp::Other('∥'))),
        "propto" => Emit(Tok::Rel(RelOp::Other('∝'))),
        "notin" => Emit(Tok::Rel(RelOp::Other('∉'))),
        "implies" | "Longrightarrow" | "iff" => Emit(Tok::Rel(RelOp::Other('⇒'))),
        "mid" => Emit(Tok::Mid),
        "cup" | "bigcup" => Emit(Tok::Union),
        "cap" | "bigcap" => Emit(Tok::Intersection),
        "setminus" | "backslash" => Emit(Tok::SetMinus),
        "emptyset" | "varnothing" => Emit(Tok::Empty),
        "lbrace" => Emit(Tok::LSet),
        "rbrace" => Emit(Tok::RSet),
        "lbrack" => Emit(Tok::LBracket),
        "rbrack" => Emit(Tok::RBracket),
        "langle" => Emit(Tok::LAngle),
        "rangle" => Emit(Tok::RAngle),
        "lfloor" => Emit(Tok::LFloor),
        "rfloor" => Emit(Tok::RFloor),
        "lceil" => Emit(Tok::LCeil),
        "rceil" => Emit(Tok::RCeil),
        "lvert" | "rvert" | "vert" | "lVert" | "rVert" | "Vert" => Emit(Tok::Bar),
        "sum" => Emit(Tok::Big(BigKind::Sum)),
        "prod" => Emit(Tok::Big(BigKind::Product)),
        "int" => Emit(Tok::Big(BigKind::Integral)),
        "lim" => Emit(Tok::Big(BigKind::Limit)),
        "to" | "rightarrow" | "Rightarrow" | "longrightarrow" => Emit(Tok::To),
        "mod" | "bmod" => Emit(Tok::Mod),
        "pmod" => Emit(Tok::PMod),
        "ldots" | "dots" | "cdots" | "dotsc" | "dotsb" => Emit(Tok::Dots),
        "cr" => Emit(Tok::NewRow),
        "colon" => Emit(Tok::Colon),
        "land" | "wedge" => Emit(Tok::Word("and".into())),
        "lor" | "vee" => Emit(Tok::Word("or".into())),
        "exponentialE" => Emit(Tok::Const(Constant::E)),
        "imaginaryI" | "imath" => Emit(Tok::Const(Constant::I)),
        "overline" | "bar" => Emit(Tok::Accent("bar".into())),
        "vec" | "overrightarrow" => Emit(Tok::Accent("vec".into())),
        "hat" | "widehat" | "dot" | "ddot" | "tilde" | "underline" | "widetilde" => {
            Emit(Tok::Accent(name.into()))
        }
        _ => return None,
    })
}

/// Whether a command name is one we know (to tell `\\frac` in escaped text from a line break and letters).
fn is_known(name: &str) -> bool {
    action(name).is_some() || named(name).is_some() || words::greek_name(name).is_some()
}

impl Lexer {
    /// Reads a command; `self.at` is at the backslash.
    pub(super) fn command(&mut self) -> Result<(), Stop> {
        let backslashes = self.chars[self.at..].iter().take_while(|c| **c == '\\').count();
        if backslashes >= 2 {
            let start = self.at + backslashes;
            let name: String = self.chars[start..].iter().take_while(|c| c.is_ascii_alphabetic()).collect();
            let escaped_bracket = matches!(self.chars.get(start), Some('{' | '}' | '%' | '$' | '!' | ','));
            if backslashes == 2 && (is_known(&name) || escaped_bracket && name.is_empty()) {
                self.at += 1;
            } else {
                self.at += 2;
                if self.peek(0) == Some('[') {
                    self.skip_row_spacing();
                }
                return self.push(Tok::NewRow);
            }
        }
        self.at += 1;
        let Some(c) = self.peek(0) else { return Ok(()) };
        if !c.is_ascii_alphabetic() {
            self.at += 1;
            return match c {
                '{' => self.push(Tok::LSet),
                '}' => self.push(Tok::RSet),
                '%' => self.push(Tok::Percent),
                '|' => self.push(Tok::Bar),
                '_' | '&' | '#' => Ok(()),
                _ => {
                    self.spaced = true;
                    Ok(())
                }
            };
        }
        let name = self.letters();
        match self.resolve(&name) {
            Some(Action::Emit(tok)) => self.push(tok),
            Some(Action::Skip) => {
                self.spaced = true;
                if matches!(name.as_str(), "left" | "right") && self.peek(0) == Some('.') {
                    self.at += 1;
                }
                Ok(())
            }
            Some(Action::Text) => self.argument(true),
            Some(Action::Font) => self.argument(false),
            Some(Action::Environment(begin)) => {
                let env = self.braced_name();
                self.push(if begin { Tok::Begin(env) } else { Tok::End(env) })
            }
            None => self.other_command(&name),
        }
    }

    /// Looks a command up; one with letters stuck to it (`\quadx`) is cut after the known part.
    fn resolve(&mut self, name: &str) -> Option<Action> {
        if let Some(found) = action(name) {
            return Some(found);
        }
        if named(name).is_some() || words::greek_name(name).is_some() {
            return None;
        }
        let known =
            ["qquad", "quad", "times", "cdot", "cup"].iter().find(|known| name.starts_with(*known))?;
        self.at -= name.len() - known.len();
        action(known)
    }

    fn other_command(&mut self, name: &str) -> Result<(), Stop> {
        if let Some(tok) = named(name) {
            return self.push(tok);
        }
        match words::greek_name(name) {
            Some(letter) => self.push(Tok::Sym(letter.into())),
            None => self.push(Tok::Sym(format!("\\{name}"))),
        }
    }

    fn skip_row_spacing(&mut self) {
        let rest: String = self.chars[self.at..].iter().take(12).collect();
        if let Some(close) = rest.find(']').filter(|c| rest[..*c].ends_with(['t', 'm', 'x'])) {
            self.at += close + 1;
        }
    }

    fn braced_name(&mut self) -> String {
        if self.peek(0) != Some('{') {
            return String::new();
        }
        self.at += 1;
        let name = self.letters();
        while self.peek(0).is_some_and(|c| c != '}') {
            self.at += 1;
        }
        self.at += 1;
        name
    }

    /// The braced argument of a text or font command.
    fn argument(&mut self, text: bool) -> Result<(), Stop> {
        while self.peek(0) == Some(' ') {
            self.at += 1;
        }
        if self.peek(0) == Some('*') {
            self.at += 1;
        }
        if self.peek(0) != Some('{') {
            return Ok(());
        }
        let Some(end) = self.closing_brace() else { return Err(Stop) };
        let content: String = self.chars[self.at + 1..end].iter().collect();
        let trimmed = content.trim_matches([' ', '~']);
        if !text && trimmed.chars().all(|c| c.is_ascii_alphabetic()) && !trimmed.is_empty() {
            self.at = end + 1;
            return self.font_letters(trimmed);
        }
        // Anything else is read in place: letters as words, the rest as usual.
        let outer_end = end;
        self.at += 1;
        self.spaced = true;
        while self.at < outer_end {
            let Some(c) = self.peek(0) else { break };
            if c.is_ascii_alphabetic() {
                let word = self.text_word(outer_end);
                self.push(if word == "mod" { Tok::Mod } else { Tok::Word(word) })?;
            } else if c.is_ascii_digit() {
                self.number()?;
            } else if c == '\\' {
                self.command()?;
            } else {
                self.at += 1;
                self.symbol(c)?;
            }
        }
        self.at = self.at.max(outer_end + 1);
        self.spaced = true;
        Ok(())
    }

    /// A word of text, with inner hyphens and apostrophes.
    fn text_word(&mut self, end: usize) -> String {
        let start = self.at;
        while self.at < end {
            let c = self.chars[self.at];
            let joins = matches!(c, '-' | '\'' | '’')
                && self.chars.get(self.at + 1).is_some_and(|n| n.is_ascii_alphabetic())
                && self.at + 1 < end;
            if !c.is_ascii_alphabetic() && !joins {
                break;
            }
            self.at += 1;
        }
        self.chars[start..self.at].iter().collect()
    }

    fn font_letters(&mut self, letters: &str) -> Result<(), Stop> {
        match letters {
            "R" | "Z" | "N" | "Q" | "C" if self.came_after_blackboard(letters) => {
                let set = letters.chars().next().unwrap_or('R');
                self.push(Tok::NamedSet(set))
            }
            "e" => self.push(Tok::Const(Constant::E)),
            "i" => self.push(Tok::Const(Constant::I)),
            "mod" => self.push(Tok::Mod),
            _ => match named(letters) {
                Some(tok) => self.push(tok),
                None if letters.len() == 1 => {
                    let after_number =
                        matches!(self.tokens.last().map(|t| &t.tok), Some(Tok::Num(_) | Tok::RBrace));
                    self.push(if after_number { Tok::Word(letters.into()) } else { Tok::Sym(letters.into()) })
                }
                None => self.push(Tok::Word(letters.into())),
            },
        }
    }

    /// Whether the argument that was just read belonged to `\mathbb`.
    fn came_after_blackboard(&self, letters: &str) -> bool {
        let written: String =
            self.chars[..self.at].iter().rev().take(16).collect::<Vec<_>>().into_iter().rev().collect();
        written.replace(' ', "").ends_with(&format!("\\mathbb{{{letters}}}"))
    }

    fn closing_brace(&self) -> Option<usize> {
        let mut depth = 0usize;
        for (i, c) in self.chars.iter().enumerate().skip(self.at) {
            match c {
                '{' => depth += 1,
                '}' => {
                    depth -= 1;
                    if depth == 0 {
                        return Some(i);
                    }
                }
                _ => {}
            }
        }
        None
    }
}
