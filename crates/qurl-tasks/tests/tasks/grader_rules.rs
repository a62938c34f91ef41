//! The rules of the `equivalence` policy, kind by kind: pairs that are the same and pairs that are not.

use qurl_tasks::grader::{Policy, equivalent, grade};

fn check(same: &[(&str, &str)], different: &[(&str, &str)]) {
    let mut wrong = Vec::new();
    for (a, b) in same {
        if !equivalent(a, b) {
            wrong.push(format!("should be the same: {a}   |   {b}"));
        }
        if !equivalent(b, a) {
            wrong.push(format!("should be the same (swapped): {b}   |   {a}"));
        }
    }
    for (a, b) in different {
        if equivalent(a, b) {
            wrong.push(format!("should differ: {a}   |   {b}"));
        }
        if equivalent(b, a) {
            wrong.push(format!("should differ (swapped): {b}   |   {a}"));
        }
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn integers_and_decimals() {
    check(
        &[
            ("42", "42"),
            ("42", "042"),
            ("42", "42.0"),
            ("42", "42."),
            ("42", "+42"),
            ("-5", "−5"),
            ("0", "-0"),
            ("1234567", "1,234,567"),
            ("1234567", "1{,}234{,}567"),
            ("1234567", "1,\\!234,\\!567"),
            ("1234567", "1\\,234\\,567"),
            ("1234567", "1 234 567"),
            ("1234.5", "1,234.50"),
            ("0.5", ".5"),
            ("0.5", "0,5"),
            ("3.14", "3,14"),
            ("100000000000000000000000000001", "100,000,000,000,000,000,000,000,000,001"),
            ("0.1", "1/10"),
            ("0.3", "0.1+0.2"),
            ("-0.25", "-\\frac14"),
            ("1/3", "0.\\overline{3}"),
            ("\\frac{41}{333}", "0.\\overline{123}"),
            ("0.1\\overline{6}", "1/6"),
            ("2/3", "0.6666667"),
            ("$17$", "17"),
            ("\\(17\\)", "17"),
            ("\\[17\\]", "17"),
            ("$$17$$", "17"),
            ("{17}", "17"),
            ("(17)", "17"),
            ("\\boxed{17}", "17"),
            ("\\text{17}", "17"),
            ("17.", "17"),
            ("\\mathbf{17}", "17"),
            ("17!", "355687428096000"),
        ],
        &[
            ("42", "43"),
            ("42", "-42"),
            ("42", "4.2"),
            ("42", "420"),
            ("42", "42.001"),
            ("1234567", "1234568"),
            ("100000000000000000000000000001", "100000000000000000000000000002"),
            ("1000000.1", "1000000.2"),
            ("0.333", "1/3"),
            ("3.14", "\\pi"),
            ("1.414", "\\sqrt2"),
            ("2.5 \\times 10^{-12}", "2.6 \\times 10^{-12}"),
            ("1e-30", "2e-30"),
            ("0", "0.0000001"),
            ("42", "x"),
            ("42", "4 2"),
            ("12", "1,2"),
            ("12,300", "12.300"),
            ("42", ""),
            ("", ""),
        ],
    );
}

#[test]
fn scientific_notation() {
    check(
        &[
            ("2.5\\times 10^2", "2.5E2"),
            ("2.5e2", "250"),
            ("4.5e33", "4.5 \\times 10^{33}"),
            ("3.61e-10", "3.61 \\cdot 10^{-10}"),
            ("6.02 x 10^{23}", "6.02 x 10^{23}"),
            ("10^{-3}", "0.001"),
            ("10^-3", "1e-3"),
            ("1,500E-1", "150"),
            ("1.0\\cdot10^{3}", "1000"),
            ("2e+3", "2000"),
        ],
        &[("2.5e2", "2.5e3"), ("7 \\times 10^{37}", "7 \\times 10^{36}"), ("1e5", "1e-5")],
    );
}

#[test]
fn fractions_and_mixed_numbers() {
    check(
        &[
            ("\\frac{1}{2}", "1/2"),
            ("\\frac{1}{2}", "2/4"),
            ("\\frac{1}{2}", "\\frac12"),
            ("\\frac{1}{2}", "\\dfrac{1}{2}"),
            ("\\frac{1}{2}", "\\tfrac 1 2"),
            ("\\frac{1}{2}", "\\cfrac{1}{2}"),
            ("\\frac{1}{2}", "½"),
            ("\\frac{1}{2}", "1 \\div 2"),
            ("\\frac{1}{2}", "0.50"),
            ("\\frac9{19}", "9/19"),
            ("\\frac{72}{5}", "\\frac{72}5"),
            ("\\frac 1{72}", "1/72"),
            ("-\\frac{1}{2}", "\\frac{-1}{2}"),
            ("-\\frac{1}{2}", "\\frac{1}{-2}"),
            ("-\\frac{1}{2}", "-1/2"),
            ("-\\frac{1}{2}", "- \\dfrac {1} {2}"),
            ("1\\frac{1}{2}", "3/2"),
            ("1\\frac12", "1.5"),
            ("1 1/2", "\\frac{3}{2}"),
            ("-2\\frac{3}{4}", "-11/4"),
            ("137 \\frac{1}{2}", "137.5"),
            ("3½", "3.5"),
            ("\\frac{1}{29,\\!322,\\!216}", "1/29322216"),
            ("\\frac{1/2}{3/4}", "2/3"),
            ("\\frac{\\frac{1}{2}}{3}", "1/6"),
            ("\\left(\\frac{3}{4}\\right)^2", "9/16"),
        ],
        &[
            ("\\frac{1}{2}", "\\frac{1}{3}"),
            ("1\\frac{1}{2}", "\\frac{1}{2}"),
            ("1\\frac{1}{2}", "11/2"),
            ("\\frac{1}{2}", "-\\frac{1}{2}"),
            ("\\frac{11}{36}", "\\frac{11}{3}"),
            ("\\frac{0}{0}", "0"),
            ("\\frac{1}{0}", "\\frac{2}{0}"),
        ],
    );
}

#[test]
fn percent_currency_units() {
    check(
        &[
            ("28\\%", "28%"),
            ("28\\%", "28"),
            ("28\\%", "28 percent"),
            ("28\\%", "0.28"),
            ("28\\%", "\\frac{28}{100}"),
            ("-5\\%", "-5"),
            ("33\\frac{1}{3}\\%", "1/3"),
            ("22\\frac{1}{2}^{\\circ}", "22.5"),
            ("12.5\\%", "12.50 \\%"),
            ("\\$36", "36"),
            ("\\$36", "36 dollars"),
            ("\\$4,\\!000", "4000"),
            ("$2.50", "2.5"),
            ("-\\$0.50", "-0.5"),
            ("5€", "5"),
            ("£5.00", "5"),
            ("10\\text{ cm}", "10"),
            ("10\\text{ cm}", "10 cm"),
            ("10\\text{ cm}", "10 \\mathrm{~cm}"),
            ("10\\text{ cm}", "10 centimeters"),
            ("10\\text{ cm}", "0.1\\text{ m}"),
            ("1.5\\text{ hours}", "90\\text{ minutes}"),
            ("45\\text{ units}^2", "45"),
            ("20\\text{ square units}", "20"),
            ("24\\text{ cm}^2", "24 \\text{ square centimeters}"),
            ("24\\text{ cm}^2", "24 cm^2"),
            ("24\\text{ cm}^2", "24 cm²"),
            ("3\\text{ ft}", "36 inches"),
            ("\\frac{4}{3} \\mathrm{~m} / \\mathrm{s}", "4/3"),
            ("15000 \\text{ kcal m}^{-2} \\text{yr}^{-1}", "15000"),
            ("90^\\circ", "90"),
            ("90^{\\circ}", "90°"),
            ("90^\\circ", "90 degrees"),
            ("90^\\circ", "\\frac{\\pi}{2}"),
            ("5 \\text{ m/s}", "5 m/s"),
            ("90^\\circ", "90\\degree"),
            ("1950^\\circ C", "1950"),
            ("164 \\pi \\mbox{ square feet}", "164\\pi"),
            ("9\\text{ values}", "9"),
            ("5 apples", "5"),
            ("0.003^{\\prime \\prime}", "0.003"),
        ],
        &[
            ("28\\%", "27\\%"),
            ("28\\%", "2.8"),
            ("12\\%", "12\\text{ hours}"),
            ("\\text{4:30 p.m.}", "\\frac{2}{15}"),
            ("28\\%", "2800"),
            ("5 \\text{ cm}", "5 \\text{ m}"),
            ("5 \\text{ cm}", "5 \\text{ cm}^2"),
            ("2 hours", "2 minutes"),
            ("90^\\circ", "80^\\circ"),
            ("\\$36", "\\$37"),
        ],
    );
}

#[test]
fn roots_powers_constants() {
    check(
        &[
            ("\\sqrt{8}", "2\\sqrt{2}"),
            ("\\sqrt 8", "2\\sqrt2"),
            ("2 \\sqrt {3}", "2√3"),
            ("sqrt(12)", "2\\sqrt{3}"),
            ("\\frac{1}{\\sqrt{6}}", "\\frac{\\sqrt{6}}{6}"),
            ("\\frac{1}{1+\\sqrt{2}}", "\\sqrt{2}-1"),
            ("\\frac{1}{\\sqrt2+\\sqrt3}", "\\sqrt{3}-\\sqrt{2}"),
            ("\\sqrt{3+2\\sqrt{2}}", "1+\\sqrt{2}"),
            ("\\sqrt[3]{54}", "3\\sqrt[3]{2}"),
            ("\\sqrt[3]{-8}", "-2"),
            ("8^{2/3}", "4"),
            ("4^{-1/2}", "0.5"),
            ("2^{10}", "1024"),
            ("2^10", "1024"),
            ("2**10", "1024"),
            ("9 \\cdot 2^{100}", "2^{100} \\cdot 3^2"),
            ("2^{4181}", "2 \\cdot 2^{4180}"),
            ("16\\sqrt{3}", "16 \\sqrt{3}"),
            ("\\sqrt{2}\\sqrt{3}", "\\sqrt{6}"),
            ("5\\sqrt{6.1}", "\\sqrt{152.5}"),
            ("\\frac{10\\sqrt{10.5}}{27}", "\\frac{5\\sqrt{42}}{27}"),
            ("\\frac{5 \\pi}{4}", "5\\pi/4"),
            ("\\frac{5 \\pi}{4}", "1.25\\pi"),
            ("2π", "2\\pi"),
            ("2pi", "2\\pi"),
            ("e^{2}", "e \\cdot e"),
            ("e^{i\\pi}", "-1"),
            ("1 + i", "i+1"),
            ("\\frac{1}{i}", "-i"),
            ("(1+i)^2", "2i"),
            ("\\frac{2}{1+i}", "1-i"),
            ("\\sqrt{-4}", "2i"),
            ("2\\operatorname{cis} 0", "2\\operatorname{cis} 0"),
            ("\\infty", "+\\infty"),
            ("\\sin 30^\\circ", "1/2"),
            ("\\cos\\frac{\\pi}{6}", "\\frac{\\sqrt3}{2}"),
            ("\\tan 60^\\circ", "\\sqrt3"),
            ("\\log_2 8", "3"),
            ("\\log_{10} 1000", "3"),
            ("\\ln e^3", "3"),
            ("\\ln 8", "3\\ln 2"),
            ("\\ln\\frac{2}{3}", "\\ln 2-\\ln 3"),
            ("\\frac{\\log 8}{\\log 2}", "3"),
            ("\\log_4 8", "1.5"),
            ("5!", "120"),
            ("\\binom{5}{2}", "10"),
            ("\\frac{100!}{98!}", "9900"),
            ("\\lfloor 3.7 \\rfloor", "3"),
            ("\\lceil 3.2 \\rceil", "4"),
            ("|-5|", "5"),
            ("17 \\bmod 5", "2"),
            ("\\sum_{k=1}^{10} k", "55"),
            ("\\prod_{k=1}^{5} k", "120"),
            ("\\max(3, 7)", "7"),
            ("1.4142135623", "\\sqrt{2}"),
            ("\\sin 18^\\circ", "\\frac{\\sqrt5-1}{4}"),
            ("\\arctan 1", "\\frac{\\pi}{4}"),
            ("\\frac{\\sqrt{5}+1}{2}", "\\frac{1+\\sqrt{5}}{2}"),
        ],
        &[
            ("\\sqrt{8}", "2\\sqrt{3}"),
            ("\\sqrt{2}+\\sqrt{3}", "\\sqrt{5}"),
            ("4\\sqrt{5}", "4+\\sqrt{5}"),
            ("\\pi", "\\frac{22}{7}"),
            ("\\frac{100!}{2^{50}}", "\\cos 13^\\circ"),
            ("\\frac{1}{2^{98}}", "\\csc 10"),
            ("1,2", "\\frac65"),
            ("\\pi", "\\frac{355}{113}"),
            ("\\sqrt{2}", "\\frac{665857}{470832}"),
            ("2^{10}", "10^2"),
            ("1+i", "1-i"),
            ("\\infty", "-\\infty"),
            ("\\ln 2", "\\log 2"),
            ("\\sin 30", "\\frac12"),
            ("3 - 2 \\sqrt{2}", "3 + 2 \\sqrt{2}"),
            ("2^{1000}", "2^{1000}+1"),
        ],
    );
}

#[test]
fn algebra() {
    check(
        &[
            ("x^2+2x+1", "(x+1)^2"),
            ("x^2+2x+1", "1+x(x+2)"),
            ("(x-1)(x+1)", "x^2-1"),
            ("xy", "yx"),
            ("2xy", "2*x*y"),
            ("\\frac{x+2}{7}", "\\frac{x}{7}+\\frac{2}{7}"),
            ("\\frac{x^2-1}{x-1}", "x+1"),
            ("\\frac{1}{x}+\\frac{1}{y}", "\\frac{x+y}{xy}"),
            ("\\frac{1}{4-\\omega^2}", "\\frac{-1}{\\omega^2-4}"),
            ("x^{-2}", "\\frac{1}{x^2}"),
            ("\\sqrt{x}\\sqrt{x}", "x"),
            ("\\sqrt[8]{x^7}", "x^{7/8}"),
            ("\\sqrt{4x+4}", "2\\sqrt{x+1}"),
            ("2^{n+1}", "2\\cdot 2^n"),
            ("4^n", "2^{2n}"),
            ("e^{-2t}", "\\frac{1}{e^{2t}}"),
            ("\\frac{e^{at}-e^{-at}}{2a}", "\\frac{\\sinh(at)}{a}"),
            ("\\sin^2 x+\\cos^2 x", "1"),
            ("2\\sin x\\cos x", "\\sin 2x"),
            ("2 \\sin b \\cos a", "\\sin(a+b)-\\sin(a-b)"),
            ("\\tan x", "\\frac{\\sin x}{\\cos x}"),
            ("\\sin^{-1} x", "\\arcsin x"),
            ("\\log_{10} x", "\\log x"),
            ("\\binom{2n}{n}", "\\frac{(2n)!}{n!n!}"),
            ("\\frac{n(n+1)}{2}", "\\sum_{k=1}^{n} k"),
            ("\\lceil n/2\\rceil", "\\left\\lceil\\frac{n}{2}\\right\\rceil"),
            ("\\lfloor\\frac{n}{2}\\rfloor+1", "1+\\lfloor n/2 \\rfloor"),
            ("\\lfloor\\frac{n^2}{3}\\rfloor", "\\frac{n^2-(n^2 \\bmod 3)}{3}"),
            ("\\lceil\\frac{n}{2}\\rceil", "\\lfloor\\frac{n+1}{2}\\rfloor"),
            ("a_{1}+a_2", "a_2+a_1"),
            ("\\theta", "θ"),
            ("\\frac{\\pi r^2 h}{3}", "\\frac13\\pi r^2h"),
            ("11z^17(11z^17+5)", "11z^{17}(5+11z^{17})"),
            ("f(4-x)", "f(-x+4)"),
            ("|x-1|", "|1-x|"),
            ("\\sqrt{x^2}", "|x|"),
            ("I(0)e^{-\\frac{t}{RC}}", "I(0) e^{-t/(RC)}"),
            ("2\\overline{x}", "2\\bar{x}"),
            ("\\frac{a M^{1/3}}{G M^{2/3}+b}", "\\frac{a \\sqrt[3]{M}}{b+G M^{2/3}}"),
            ("180(n-4)", "180n-720"),
            ("-(n-1)/2", "\\frac{1-n}{2}"),
            ("x^{3 + 1}", "x^{4}"),
        ],
        &[
            ("\\frac{1}{x+1}", "(x+1)^{-9223372036854775808}"),
            ("x", "y"),
            ("x", "X"),
            ("x^2", "2x"),
            ("|x|", "x"),
            ("\\sqrt{x^2}", "x"),
            ("x^2+2x+1", "x^2+2x+2"),
            ("\\sin x", "\\cos x"),
            ("2^n", "n^2"),
            ("\\frac{x}{y}", "\\frac{y}{x}"),
            ("f(x)", "f(y)"),
            ("a_1", "a_2"),
            ("(a+5)(b+2)", "(a+2)(b+5)"),
            ("I(0)e^{-t}", "0"),
            ("\\lfloor n/2\\rfloor", "\\lceil n/2\\rceil"),
            // Nothing near zero, or at whole numbers.
            ("7", "7+\\lfloor x/100\\rfloor"),
            ("7", "\\max(7,x/1000)"),
            ("7", "7+(x \\bmod 1)"),
            ("7", "7+\\lfloor x/10^9\\rfloor"),
            ("7", "7+\\sqrt{(x-10^9)^2}+x-10^9"),
            ("x", "x+\\lfloor x/1000\\rfloor"),
            ("x", "\\max(x, x^2/10^5)"),
            ("n^2", "n^2+\\lfloor n/10^5\\rfloor"),
            ("\\lfloor n/2\\rfloor", "\\lfloor |n|/2\\rfloor"),
            ("n!", "(n-1)!"),
            ("4t", "4"),
            ("6m", "6"),
        ],
    );
}

#[test]
fn equations_and_inequalities() {
    check(
        &[
            ("x=5", "5"),
            ("5", "x = 5"),
            ("5", "5 = x"),
            ("y=2x+3", "2x+3"),
            ("y=2x+3", "y-2x=3"),
            ("y=2x+3", "-2y+4x+6=0"),
            ("f(x)=2x", "2x"),
            ("f(x)=2x", "f(x)=x+x"),
            ("f(x)=2x", "y=2x"),
            ("xy=1", "y=\\frac{1}{x}"),
            ("x^2+y^2=1", "2x^2+2y^2=2"),
            ("\\frac{x^2}{4}+\\frac{y^2}{3}=1", "3x^2+4y^2=12"),
            ("x=\\sqrt{2}", "\\sqrt2 x = 2"),
            ("\\angle ABC = 90^\\circ", "90"),
            ("S_{10} = 55", "55"),
            ("|AB| = 3", "3"),
            ("\\frac{AB}{CD} = 2", "2"),
            ("AB:CD = 2:3", "2:3"),
            ("x = 2, x = -3", "-3, 2"),
            ("x=2 \\text{ or } x=-3", "x=-3,2"),
            ("x = 1 \\pm \\sqrt{19}", "1-\\sqrt{19}, 1+\\sqrt{19}"),
            ("x=1,y=2", "y=2, x=1"),
            ("x=1,y=2", "(1,2)"),
            ("(x,y)=(1,2)", "(1,2)"),
            ("(x,y)=(1,2)", "x=1, y=2"),
            ("x<3", "3>x"),
            ("x<3", "x \\lt 3"),
            ("x\\le 3", "x<=3"),
            ("x\\leqslant 3", "x ≤ 3"),
            ("2x<6", "x<3"),
            ("-x>-3", "x<3"),
            ("x\\ne 3", "x \\neq 3"),
            ("x<3", "(-\\infty,3)"),
            ("x\\geq 3", "[3,\\infty)"),
            ("-2<x\\le 7", "(-2,7]"),
            ("7 \\ge x > -2", "-2<x\\le 7"),
            ("x \\in (1,2)", "1<x<2"),
            ("x<1 \\text{ or } x>3", "(-\\infty,1)\\cup(3,\\infty)"),
            ("x>1 \\text{ and } x<3", "(1,3)"),
            ("|x|<2", "(-2,2)"),
            ("x^2<4", "-2<x<2"),
            ("x \\ne 2", "(-\\infty,2)\\cup(2,\\infty)"),
            ("\\{x \\mid 2<x<3\\}", "(2,3)"),
            ("\\{x | x > 1\\}", "x>1"),
            ("N \\equiv 672 \\pmod{1000}", "672"),
            ("x \\equiv 3 \\pmod 5", "x \\equiv 3 (\\bmod 5)"),
            ("\\frac{\\sqrt{3}}{3} \\approx 0.577", "\\frac{1}{\\sqrt3}"),
            ("x \\approx 3.14", "3.14"),
            ("e^{i\\pi} = -1", "-1"),
            ("2+2=4", "4"),
            ("a+b \\ge 2\\sqrt{ab}", "\\frac{a+b}{2} \\geq \\sqrt{ab}"),
            ("k\\geqslant 2", "k \\ge 2"),
            ("\\text{Area} = 12", "12"),
            ("\\frac{dy}{dx} = 2x", "2x"),
            ("P(X=1) = \\frac{1}{2}", "1/2"),
            ("x=2 or x=3", "x \\in \\{2, 3\\}"),
            ("x>2, y>3", "y>3, x>2"),
            ("5x - 7y + 11z + 4 = 0", "-5x+7y-11z-4=0"),
        ],
        &[
            ("x=5", "x=6"),
            ("x=5", "y=5+y"),
            ("x=5", "n=5"),
            ("f(x)=5", "x=5"),
            ("x<3", "x>3"),
            ("x<3", "x\\le 3"),
            ("x<3", "x<4"),
            ("x<3", "3"),
            ("x<3", "-x<-3"),
            ("x>2", "x>2, y>3"),
            ("x>2, y>3", "x>3, y>2"),
            ("y=2x+3", "y=2x-3"),
            ("a+3z=0", "0"),
            ("x^2=4", "4"),
            ("x+y=4", "4"),
            ("x=2, x=-3", "x=2, x=3"),
            ("x=1,y=2", "x=2,y=1"),
            ("x=1,y=2", "(2,1)"),
            ("(x,y)=(1,2)", "(2,1)"),
            ("x < y", "x > y"),
            ("a^2 + b^2 = c^2", "a^2+b^2=2c^2"),
            ("x \\in (1,2)", "y \\in (1,3)"),
            ("|x|<2", "(-2,2]"),
            ("x^2<4", "(-2,3)"),
            ("3*4=13", "12"),
        ],
    );
}

#[test]
fn sets_tuples_intervals() {
    check(
        &[
            ("1,2,3", "3, 2, 1"),
            ("1,2,3", "\\{1,2,3\\}"),
            ("1,2,3", "{1, 2, 3}"),
            ("1,2,3", "1, 2 and 3"),
            ("1,2,3", "1,2,\\text{ and }3"),
            ("1,2,3", "1; 2; 3"),
            ("\\{1,2\\}", "\\{2,1,1\\}"),
            ("\\left\\{1,2\\right\\}", "\\{2,1\\}"),
            ("\\{5\\}", "5"),
            ("1,000,2,000", "1,000,2,000"),
            ("100,200,300", "100, 200, 300"),
            ("3\\pm2\\sqrt2", "3+2\\sqrt2, 3-2\\sqrt2"),
            ("\\pm 2", "2,-2"),
            ("\\pm 2", "\\{-2,2\\}"),
            ("\\{1\\pm\\sqrt5,-2\\}", "-2,1+\\sqrt5,1-\\sqrt5"),
            ("(1,2)", "\\left(1,2\\right)"),
            ("(1,2)", "( 1 , 2 )"),
            ("(1,2)", "(\\frac22, 2.0)"),
            ("(3, \\frac{\\pi}{2})", "(3,\\pi/2)"),
            ("(1,2,3)", "[1,2,3]"),
            ("(1,2,3)", "\\langle 1,2,3\\rangle"),
            ("(1,2),(3,4)", "(3,4),(1,2)"),
            ("(1,2),(3,4)", "\\{(3,4),(1,2)\\}"),
            ("(1,2),(3,4)", "(3,4) \\text{ and } (1,2)"),
            ("(-4, 27);(2, 15)", "(2,15),(-4,27)"),
            ("[0,1)", "\\left[0,1\\right)"),
            ("(-\\infty,3]", "(-∞,3]"),
            ("(-\\infty,1)\\cup(2,3)", "(2,3)\\cup(-\\infty,1)"),
            ("(0,2)\\cup[1,3]", "(0,3]"),
            ("(0,1)\\cup\\{1\\}", "(0,1]"),
            ("\\mathbb{R}\\setminus\\{2\\}", "(-\\infty,2)\\cup(2,\\infty)"),
            ("\\mathbb{R}", "(-\\infty,\\infty)"),
            ("\\emptyset", "\\{\\}"),
            ("\\emptyset", "\\varnothing"),
            ("[\\frac12, 8]", "[0.5,8]"),
            ("[0,5]\\cap[3,8]", "[3,5]"),
            ("1:2", "2:4"),
            ("1:2", "1/2"),
            ("3:4:5", "6:8:10"),
            ("(6,235^\\circ)", "(6,235)"),
            ("1,i,-i", "-i,i,1"),
            ("\\text{B,C}", "B, C"),
            ("5,\\,-11", "-11,5"),
        ],
        &[
            ("1,2,3", "1,2"),
            ("1,2,3", "1,2,4"),
            ("(1,2)", "(2,1)"),
            ("(1,2)", "\\{1,2\\}"),
            ("(1,2)", "[1,2]"),
            ("[0,1)", "(0,1)"),
            ("[0,1)", "[0,1]"),
            ("[0,1)", "[0,2)"),
            ("(0,1)\\cup(1,2)", "(0,2)"),
            ("\\pm2", "2"),
            ("\\pm2", "-2"),
            ("(1,2,3)", "(1,2)"),
            ("1:2", "2:1"),
            ("12:00", "1:00"),
            ("12:30", "12:45"),
            ("(1,2),(3,4)", "(1,2)"),
            ("(1,2),(3,4)", "(1,3),(2,4)"),
            ("\\mathbb{R}", "\\mathbb{Z}"),
            ("3,5", "35"),
        ],
    );
}

#[test]
fn matrices() {
    check(
        &[
            ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{bmatrix} 1 & 2 \\\\ 3 & 4 \\end{bmatrix}"),
            (
                "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}",
                "\\left(\\begin{array}{cc}1&2\\\\3&4\\end{array}\\right)",
            ),
            ("\\begin{pmatrix}1/2\\\\3\\end{pmatrix}", "\\begin{pmatrix}\\frac12\\\\3\\end{pmatrix}"),
            ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "(1,2)"),
            ("\\begin{pmatrix}2&4\\end{pmatrix}", "2\\begin{pmatrix}1&2\\end{pmatrix}"),
            (
                "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}+\\begin{pmatrix}1&1\\\\1&1\\end{pmatrix}",
                "\\begin{pmatrix}2&3\\\\4&5\\end{pmatrix}",
            ),
            (
                "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}\\begin{pmatrix}0&1\\\\1&0\\end{pmatrix}",
                "\\begin{pmatrix}2&1\\\\4&3\\end{pmatrix}",
            ),
            ("\\begin{pmatrix}1\\\\2\\\\\\end{pmatrix}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"),
        ],
        &[
            ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{pmatrix}1&2\\\\3&5\\end{pmatrix}"),
            ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{pmatrix}1&3\\\\2&4\\end{pmatrix}"),
            ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix}1\\\\2\\\\3\\end{pmatrix}"),
            ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "(2,1)"),
            ("\\begin{pmatrix}1\\end{pmatrix}", "2"),
        ],
    );
}

#[test]
fn words_and_choices() {
    check(
        &[
            ("\\text{odd}", "odd"),
            ("\\text{Even}", "even"),
            ("\\text{two lines}", "Two lines."),
            ("\\mbox{Saturday}", "\\text{Saturday}"),
            ("\\text{ellipse}", "an ellipse"),
            ("\\text{Navin}", "{Navin}"),
            ("\\text{yes}", "Yes"),
            ("\\text{(B)}", "B"),
            ("B", "(B)"),
            ("B", "\\text{B}"),
            ("B", "\\textbf{(B)}"),
            ("B", "B."),
            ("B", "(B) 12"),
            ("B", "B. 12"),
            ("12", "(B) 12"),
            ("12", "\\textbf{(B)}\\ 12"),
            ("\\text{October 30}", "October 30"),
            ("\\mbox{four}", "4"),
            ("\\text{forty-two}", "42"),
        ],
        &[
            ("B", "C"),
            ("B", "(C) 12"),
            ("A", "B"),
            ("\\text{(C)}", "\\text{A,C}"),
            ("odd", "even"),
            ("odd", "oddd"),
            ("\\text{June 20}", "\\text{June 21}"),
            ("E", "\\mathrm{E}*2"),
            ("A", "A+1"),
            ("B", "Because 12"),
            ("yes", "no"),
        ],
    );
}

#[test]
fn extraction() {
    let right = [
        ("7", "So \\boxed{7}."),
        ("7", "First \\boxed{5}, then \\boxed{7}"),
        ("\\frac{1}{2}", "$\\boxed{\\frac{1}{2}}$"),
        ("\\{1,2\\}", "$\\boxed{\\{1, 2\\}}$"),
        ("7", "We get 3 + 4.\n#### 7"),
        ("1234", "#### 1,234"),
        ("7", "Answer: 7"),
        ("7", "**Answer:** 7"),
        ("7", "The answer is 7."),
        ("7", "The final answer is $7$. I hope it is correct."),
        ("7", "**Final Answer**\n\\boxed{7}"),
        ("7", "<think>maybe \\boxed{3}</think> It is \\boxed{7}"),
        ("7", "<think>3</think><answer>7</answer>"),
        ("7", "<answer>\\boxed{7}</answer>"),
        ("7", "I count 3, 4, and in the end there are 7"),
        ("7", "therefore $x = 7$"),
        ("7.5", "It costs $7.50."),
        ("-3", "so it goes to -3."),
        ("7", "the result is 7<|im_end|>"),
        ("x<3", "We find $x < 3$."),
        ("(1,2)", "The point is $(1,2)$."),
        ("1,2", "$\\boxed{1}$ and $\\boxed{2}$"),
        ("7", "答案是7"),
        ("12", "\\boxed 12"),
        ("12", "$\\fbox{12}$"),
        ("5", "\\boxed{5}\n\n\\boxed{5}"),
        ("circle", "The answer is a circle."),
        ("B", "The correct option is B"),
        ("B", "Option B"),
        ("yes", "Yes, it is."),
        ("5", "Therefore, x = 5."),
        ("18", "She makes 9 * 2 = $<<9*2=18>>18 every day.\n#### 18"),
    ];
    let wrong = [
        ("7", "First \\boxed{7}, then \\boxed{5}"),
        ("7", "#### 8"),
        ("7", "Answer: 8"),
        ("7", "\\boxed{}"),
        ("7", "A7Z"),
        ("7", "no idea"),
        ("7", ""),
        ("7", "   \n"),
        ("7", "<think>\\boxed{7}</think> It is \\boxed{3}"),
        ("circle", "there are 7 circles or 3 squares"),
    ];
    for (gold, response) in right {
        let grade = grade(gold, response, Policy::Equivalence);
        assert!(grade.equal, "{gold} in {response:?}: {grade:?}");
    }
    for (gold, response) in wrong {
        let grade = grade(gold, response, Policy::Equivalence);
        assert!(!grade.equal, "{gold} not in {response:?}: {grade:?}");
    }
}

#[test]
fn policies_differ_where_they_should() {
    let cases = [
        (Policy::StrictBox, "5", "the answer is 5", false),
        (Policy::StrictBox, "5", "\\boxed{5}", true),
        (Policy::AnswerLine, "5", "\\boxed{5}", false),
        (Policy::AnswerLine, "5", "so\nAnswer: $5$\n", true),
        (Policy::AnswerLine, "5", "Answer: 4\nAnswer: 5", true),
        (Policy::ThinkSplit, "5", "\\boxed{5}", false),
        (Policy::ThinkSplit, "5", "hm</think>\\boxed{5}", true),
        (Policy::ThinkSplit, "5", "\\boxed{5}</think>", false),
        (Policy::BracketAnswer, "5", "it is [5.0]", true),
        (Policy::BracketAnswer, "5", "it is 5", false),
        (Policy::AnswerTags, "2x", "<answer>x+x</answer>", true),
        (Policy::AnswerTags, "2x", "x+x", false),
        (Policy::PercentAsRatio, "50\\%", "0.5", true),
        (Policy::PercentAsRatio, "50\\%", "50", false),
        (Policy::PercentAsRatio, "50\\%", "50%", true),
        (Policy::ReducedFraction, "\\frac12", "\\frac{2}{4}", false),
        (Policy::ReducedFraction, "\\frac12", "\\frac{1}{2}", true),
        (Policy::ReducedFraction, "\\frac12", "2/4", false),
        (Policy::ReducedFraction, "\\frac12", "0.5", true),
        (Policy::DapoNormalize, "1000", "1,000", true),
        (Policy::DapoNormalize, "\\frac{1}{2}", "0.5", false),
        (Policy::DapoNormalize, "5", "x = 5", true),
    ];
    for (policy, gold, response, expected) in cases {
        let grade = grade(gold, response, policy);
        assert_eq!(grade.equal, expected, "{}: {gold} in {response:?}: {grade:?}", policy.name());
    }
    let far = format!("Answer: 5\n{}", "x".repeat(400));
    assert!(!grade("5", &far, Policy::DapoTail300).equal);
    assert!(grade("5", &format!("{}\nAnswer: 5", "x".repeat(400)), Policy::DapoTail300).equal);
    assert!("nonsense".parse::<Policy>().unwrap_err().to_string().contains("strict_box"));
}

/// Whole numbers of any size under a root: what fifteen digits cannot tell apart.
#[test]
fn square_roots_of_large_numbers_are_exact() {
    check(
        &[
            ("\\sqrt{1000000000000000000000000000000}", "10^{15}"),
            ("\\sqrt{4000000000000000000000000000004}", "2\\sqrt{1000000000000000000000000000001}"),
            ("\\sqrt{999999999999999999999999999988}", "\\sqrt{999999999999999999999999999988}+0"),
            // 1000000007 * 1000000009, too large to be factored by trial
            ("\\sqrt{1000000007}\\cdot\\sqrt{1000000009}", "\\sqrt{1000000016000000063}"),
            (
                "\\frac{1}{\\sqrt{1000000016000000063}}",
                "\\frac{\\sqrt{1000000016000000063}}{1000000016000000063}",
            ),
            ("1000000007\\sqrt{1000000009}", "\\sqrt{1000000023000000175000000441}"),
            ("3+\\sqrt{1000000016000000063}", "\\sqrt{1000000016000000063}+3"),
        ],
        &[
            ("\\sqrt{1000000000000000000000000000001}", "10^{15}"),
            ("\\sqrt{1000000000000000000000000000001}", "\\sqrt{1000000000000000000000000000003}"),
            ("\\sqrt{1000000016000000063}", "1000000008"),
            ("3+\\sqrt{1000000016000000063}", "3-\\sqrt{1000000016000000063}"),
            ("-\\sqrt{1000000016000000063}", "\\sqrt{1000000016000000063}"),
        ],
    );
}

/// A number inside of a formula that could not be read is no answer.
#[test]
fn parts_of_unreadable_formulas_are_no_answers() {
    let deep = format!("{}7{}", "(".repeat(60), "+1)".repeat(60));
    let long = format!("1{}", "+1".repeat(3000));
    for (gold, response) in [
        ("1", "The answer is 9^{9^{9^9}} + \\foo 1"),
        ("5", "\\frac{\\undefined}{5"),
        ("7", "so we get \\oint_{C} \\otimes 7"),
        ("1", deep.as_str()),
        ("1", long.as_str()),
        ("3", "we find that ?? * 3"),
        ("4", "the total is (?? 2) - 4"),
        ("1", "2↑↑1"),
        ("1", "it is ?? ± 1"),
        ("1", "we only know ≠ 1"),
        ("1", "?? x < 1"),
        ("1", "?? x > 1"),
        ("1", "?? 1 ⋅ n"),
    ] {
        let graded = grade(gold, response, Policy::Equivalence);
        assert!(!graded.equal, "{gold} | {:?}", graded.extracted);
    }
    for (gold, response) in [
        ("7", "After all of this, we have found 7"),
        ("7", "I first thought $x^2 + 1$, but there are 7 apples left"),
        ("7", "There are **7** apples, as ?? said"),
        ("-7", "It is cold today: -7"),
        ("7", "It ?? so x => 7"),
        ("7", "What ?? follows -> 7"),
        ("7", "> 7"),
        ("7", "Well ?? <b>7</b>"),
    ] {
        assert!(grade(gold, response, Policy::Equivalence).equal, "{gold} | {response}");
    }
}
