// Lists of registers for the asm statements of instructions with many operands: TILEWISE_D64(how,
// 0) is how(d[0]), ..., how(d[63]), and TILEWISE_NAMES64 is "%0,...,%63", their names.
#pragma once

#define TILEWISE_D8(how, i)                                                             \
  how(d[i]), how(d[i + 1]), how(d[i + 2]), how(d[i + 3]), how(d[i + 4]), how(d[i + 5]), \
      how(d[i + 6]), how(d[i + 7])
#define TILEWISE_D16(how, i) TILEWISE_D8(how, i), TILEWISE_D8(how, i + 8)
#define TILEWISE_D32(how, i) TILEWISE_D16(how, i), TILEWISE_D16(how, i + 16)
#define TILEWISE_D40(how, i) TILEWISE_D32(how, i), TILEWISE_D8(how, i + 32)
#define TILEWISE_D48(how, i) TILEWISE_D32(how, i), TILEWISE_D16(how, i + 32)
#define TILEWISE_D64(how, i) TILEWISE_D32(how, i), TILEWISE_D32(how, i + 32)
#define TILEWISE_D96(how, i) TILEWISE_D64(how, i), TILEWISE_D32(how, i + 64)
#define TILEWISE_D128(how, i) TILEWISE_D64(how, i), TILEWISE_D64(how, i + 64)
#define TILEWISE_NAMES16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define TILEWISE_NAMES32 \
  TILEWISE_NAMES16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define TILEWISE_NAMES40 TILEWISE_NAMES32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define TILEWISE_NAMES48 TILEWISE_NAMES40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define TILEWISE_NAMES64 \
  TILEWISE_NAMES48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define TILEWISE_NAMES96                                                                          \
  TILEWISE_NAMES64                                                                                \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86," \
  "%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define TILEWISE_NAMES128                                                                   \
  TILEWISE_NAMES96                                                                          \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113," \
  "%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
